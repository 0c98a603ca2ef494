"""The runtime: executes a plan's schedule with real collectives.

From a plan to a step: ``apply`` (checks, finds units, allocates, attaches hooks) makes ``bucket`` and
``unit`` (storage, local shards), ``updates`` (inner optimizers, clipping's factor, ``offload``), ``engine``
(hooks to schedule, ``step_state``) and ``optimizer`` (the user's face). Tasks run in ``executor`` (a thread
per stream) or ``launcher`` (CUDA streams, ``cuda``) on ``world``'s ``backends``. What goes wrong: ``faults``,
``hang_report``, ``out_of_memory``, ``replicas``.
"""
