"""The benchmark suite: published models on the clusters they are trained on, and what the planner finds for them.

Every figure comes through the product's own path: the graph of the model, its patterns, the search, and the cost model, which
judges our plan and those that it is compared with alike.
"""
