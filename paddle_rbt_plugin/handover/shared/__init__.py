"""What programs of both IRs and dygraph share.

- ``conversion``: meshes and placements of a plan as Paddle's own classes.
- ``strategy``: between Paddle's Strategy and the tuner.
- ``zero``, ``recompute``: which states a plan divides, which layers it recomputes.
- ``custom_ops``: how a custom op runs on local tensors.
- ``copies``, ``replicas``: all ranks start from the weights of rank 0; what ranks should hold alike is compared.
- ``random_streams``: alike where a tensor is replicated, different for every shard.
- ``engine_state``, ``engine_random``: what an engine holds, whatever programs it runs.
- ``gloo``, ``gloo_paddle_2``: static programs of CPU processes communicate.
"""
