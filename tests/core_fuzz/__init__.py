"""Fuzzer of the core: random worlds on a model of the device that knows the content of every KV slot.

    PYTHONPATH=tests python -m core_fuzz --minutes 60
    PYTHONPATH=tests python -m core_fuzz --seed 7 --round 1234 --rounds 1

| module | contents |
|---|---|
| `device` | the worker as the core sees it: moves, slices that run or fail, and the content of every slot |
| `machine` | an engine core in a world, calls on it, and the invariants that each call must keep |
| `draw` | a random world, load and driver with faults, from one seed |
| `shrink` | a smaller case with the same finding, and the case as a program |
"""
