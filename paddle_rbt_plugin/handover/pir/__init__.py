"""Programs of PIR.

From a model to a program: ``trace``, ``saved``, ``configs`` (the graph of a named model).
From a serial program to an annotated one: ``replay`` (one mesh) and ``pipeline`` (stages), op by op through ``rewrite`` (what
stands for an op), ``custom_ops`` and ``seeds`` (random ops); ``inplace`` refuses what would compute something else.
What runs again, in turn, or in parts: ``recompute``, ``chunks``, ``shared_weights``, ``zero``, ``updates``, ``clipping``,
``gradient_merge``, ``parameter_attributes``.
The program that Paddle makes, compared with the cost model: ``partitioning``, ``structure`` (what a program has),
``prediction`` (what the cost model expects), ``verification``.
What an engine prepares: ``engine_programs``, ``engine_data``, ``engine_outputs``, ``first_plan``.
What is changed in Paddle: ``patches``.
"""
