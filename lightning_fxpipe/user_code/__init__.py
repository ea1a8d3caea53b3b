"""Code that is not ours: where it is, what it may change, and running it once more without leaving anything behind.

A dry run, from the outside in
    - ``undo``: the block to run it in: what it leaves behind is put back. ``silence``: nothing of it is heard.
    - ``files``: what user code writes to files is written once.
    - ``snapshot``: what a module's code can reach and change, at one moment, and what differs now.
    - ``paths``: where something is that has changed.
    - ``kinds``: which contents an object has, by its class, and what is left alone.
    - ``contents``, ``code_contents``, ``iterators``: each kind of contents: how it is taken, compared and put back.
    - ``writes``: values of tensors that are changed in place.
    - ``memos``: functions with a cache.
    - ``inference_mode``: steps turn gradients off instead.
    - ``for_microbatch``: runs for single microbatches, and what may not be done in them.
    - ``members``: a module's submodules, parameters and buffers, listed once.

Other values in a module's place
    - ``exchange``: other tensors. ``placement``: on another device.
    - ``made_up``: stands for what is not there yet.

What code says of itself
    - ``step``: a call of one of the module's steps by Lightning. ``step_code``: what its code may do.
    - ``changing_code``: which attributes code may change, by its names.
    - ``bytecode``, ``code_names``: the instructions, and the global names in them.
    - ``frames``: where in the user's code something happened.
    - ``calls``: watches the calls of modules and functions from outside.
    - ``objects``: objects with tensors inside, such as a cache.
"""
