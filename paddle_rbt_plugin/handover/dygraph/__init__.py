"""Dygraph semi-auto training.

- ``sharding``: a plan's parameters, optimizers and batches.
- ``optimizer``: states lie as their parameters, and are divided over the replicas.
- ``recompute``, ``random``: layers run again, random ops draw by placement.
- ``ops``: the forms of ops that the plan was costed with, on ``local_tensors``; ``whole_operands``: ops that Paddle gets wrong.
"""
