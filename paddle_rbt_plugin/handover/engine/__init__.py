"""``auto.Engine`` and ``dist.to_static``.

- ``hooks``: where the tuner is called; in PIR with the serial program of a mode.
- ``forward_loss``: models whose forward returns the loss.
- ``guard``: every process compares its program with the plan.
- ``life``: ``fit``, ``evaluate``, ``predict``, ``run``, ``save`` and ``load``; ``inference``: the serial model for prediction.
"""
