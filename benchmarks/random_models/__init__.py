"""Random small models and training scripts, trained alone and under the tuner, compared and shrunk; see ``../differential.py``.

    draw -> case (JSON) -> worker processes: model, script -> compare -> shrink -> spell

``blocks`` and ``grammar`` say what a case may hold, ``draw`` draws one. ``layers``, ``transformer``, ``movement`` and
``losses`` are the blocks as Layers, of which ``model`` makes a model. ``script`` trains it in one process of a job; ``worker``
is such a process, ``pool`` starts and asks them. ``compare`` puts the parts of all ranks together, ``run`` takes one case from
start to end, ``shrink`` makes a failing case small, and ``spell`` writes it down.
"""
