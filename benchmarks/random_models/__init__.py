"""Random small models and training scripts, trained alone and under the tuner, compared and shrunk; see ``../differential.py``.

    draw -> case (JSON) -> worker processes: model, script -> compare -> shrink -> spell

``grammar`` says what a case may hold, without Paddle; ``draw`` draws cases from it; ``layers`` and ``losses`` are its blocks as
Layers; ``script`` trains a case in one process of a job; ``worker`` is such a process and ``pool`` its parent's side; ``compare``
puts the parts of all ranks together; ``shrink`` makes a failing case small and ``spell`` readable.
"""
