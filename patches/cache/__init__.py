"""Key/value caches for Transformers, put together of three parts: layer × store × format.

* A `Store` has room for tokens. It grows, or is fixed and counts its tokens on the device.
* A `Format` is what is kept of a token and what attention is told of it: numbers, `int8` or `k8v4`.
* A layer says which tokens are kept: all, those of a window, or what the plan of each head reads.

**The contract of views.** What `update` returns is a view of the store, as `layer.keys` and `layer.values` are.

* How long it is valid: a view of numbers until the next `crop`, `reorder_cache`, `batch_select_indices`,
  `batch_repeat_interleave` or `reset` of its layer. `update` writes behind it, never over it. What stands for codes,
  and what attention reads of streaming heads, only until the next `update`, as codes may be made anew. Behind that
  the memory may belong to other tokens: nobody is asked who still looks.
* Who may hold it: attention, for its call. Everybody else looks at once, or keeps a copy: `clone()` of a tensor, or
  `copy.deepcopy` or a pickle of a cache. Copies share no memory.
* Gradients: while they are recorded, numbers are concatenated and nothing is written to what was returned, since
  autograd may have saved it. Codes and streaming heads have no gradient and refuse tokens that want one.
* What copies: tokens are copied once, when they come; the past, when its room is used up or a window leaves much of it
  empty; rows, when a selection moves them; tensors that are assigned to `layer.keys` or `layer.values`, at the next
  call; everything, to another device.
"""
