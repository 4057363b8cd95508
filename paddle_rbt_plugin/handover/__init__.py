"""Hands plans over to Paddle: programs are annotated, models sharded, engines hooked.

Sorted by what executes; a folder imports only from those listed before it (``tests/test_house.py``):

- ``shared``: what all others need: meshes and placements in Paddle's classes, strategies, initial weights, random streams.
- ``pir``: programs of the new IR: tracing, rebuilding on distributed inputs, pipelines, ZeRO, what an engine prepares.
- ``legacy``: programs of the old IR, through Paddle's DistributedContext and Partitioner.
- ``dygraph``: Layers, optimizers and batches of dygraph semi-auto training.
- ``checkpoint``: files with the tensors of engines, models and optimizers, independent of a plan.
- ``passes.py``: the registered pass ``rule_based_tuner``, for programs of either IR.
- ``engine``: ``auto.Engine`` and ``dist.to_static``: hooks, the methods of engines (``fit`` and so on), the guard.
"""
