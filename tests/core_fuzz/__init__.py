"""Fuzz of the core: random worlds on a model of the device that knows what every KV slot holds.

    PYTHONPATH=tests python -m core_fuzz --minutes 60
    PYTHONPATH=tests python -m core_fuzz --seed 7 --first 1234 --count 1

| module | what is in it |
|---|---|
| `device` | the worker as the core sees it: moves, slices, give-ups, and the content of every slot on both tiers |
| `machine` | an engine core in a world, calls on it, and what must hold after each of them |
| `draw` | a random world, load and driver with faults, from one seed |
| `shrink` | a smaller case with the same finding, and the case as a script |
"""
