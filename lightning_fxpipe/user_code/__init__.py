"""Code that is not ours: where it is, what it may change, and running it once more without leaving anything behind.

What it can change
    - ``contents``, ``code_contents``, ``iterators``: what is in an object, a class, an iterator, and how it is put back.
    - ``kinds``: which of these an object has, and what is left alone.
    - ``memos``: functions with a cache.
    - ``snapshot``: all of it, from a module on, at one moment.
    - ``writes``: values of tensors that are changed in place.

Running it once more
    - ``undo``: what a run leaves behind is put back.
    - ``silence``: nothing of it is heard.
    - ``made_up``: stands for what is not there yet.
    - ``exchange``, ``placement``: other tensors in a module's place, and where they are.

What it is
    - ``frames``: where in the user's code something happened.
    - ``bytecode``, ``code_names``, ``step_code``: what code says of itself before it runs.
    - ``step``: a call of one of the module's steps by Lightning.
    - ``calls``: the calls that it makes, seen from outside.
    - ``objects``: objects with tensors inside.
"""
