"""Former names of recipes, for errors."""

_PAPERS = "benchmarks/papers"
# Baselines of the papers are in files of the source repository, next to their benchmarks.
RENAMED = {
    "alise-defer": "alise[eviction=defer]",
    "alise-fp": f"{_PAPERS}/alise/recipes.py:alise-fp",
    "alise-oracle": f"{_PAPERS}/alise/recipes.py:alise-oracle",
    "alise-reactive": "alise[eviction=reactive]",
    "alise-recompute": "alise[eviction=recompute]",
    "bros-recompute": "bros[eviction=recompute]",
    "bros-swap": "bros[eviction=swap]",
    "bros-unshared": "bros[eviction=partial]",
    "econoserve-d": f"{_PAPERS}/econoserve/recipes.py:econoserve-d",
    "econoserve-sd": f"{_PAPERS}/econoserve/recipes.py:econoserve-sd",
    "econoserve-sdo": "econoserve[sharing=off]",
    "fastserve-defer": "fastserve[eviction=defer]",
    "fastserve-reactive": "fastserve[eviction=reactive]",
    "fastserve-recompute": "fastserve[eviction=recompute]",
    "fixed-priority": f"{_PAPERS}/fastserve/recipes.py:fixed-priority",
    "mlfq": f"{_PAPERS}/fastserve/recipes.py:mlfq",
    "multires": f"{_PAPERS}/econoserve/recipes.py:multires",
    "orca": f"{_PAPERS}/fastserve/recipes.py:orca",
    "round-robin": f"{_PAPERS}/bros/recipes.py:round-robin",
    "static": f"{_PAPERS}/fastserve/recipes.py:static",
    "synccoupled": f"{_PAPERS}/econoserve/recipes.py:synccoupled",
}


def renamed(name: str) -> str:
    new = RENAMED[name]
    base, bracket, parameter = new.partition("[")
    hint = f"or recipe {base} with --set {parameter.rstrip(']')}" if bracket else "a file of the source repository"
    return f"recipe {name!r} is now {new}, {hint}"
