"""A simulated accelerator: what the runtime puts into CUDA's streams, recorded and run in other orders.

One step of the real runtime is run for N ranks, each a thread, on processors, through the launcher that GPUs
use (``recording``, ``ranks``). Every operation of torch, with its memory, is kept beside the stream that it
was put into and the events that hold it: that program does not depend on timing, as a host that waits for
nothing decides nothing by it. Two readers say what a device may make of it, with CUDA's and NCCL's rules and
none of their kindness:

- ``races``: two operations that touch the same memory, one of them writing, must be ordered by streams and
  events, else some interleaving gives another result. That covers all interleavings at once.
- ``interleavings``: the program on memory of its own, in one adversarial order after the other, with real
  numbers; collectives hold a share of the device until every rank of their group has arrived.

Freed memory is overwritten at once, in the order of the stream that it was allocated on: a caching allocator
with a pool per stream gives it to whoever asks next.
"""
