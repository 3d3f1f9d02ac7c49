"""Builds systems to simulate from names: a GPU of the catalogue, or the profile of a measured machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skipjoin.bench.simulation import System
from skipjoin.config import DEFAULT_SLO_S, ConfigError, check_above_zero, check_slo, check_swap_space, unknown
from skipjoin.policies.starvation import starvation_after
from skipjoin.profile import read_profile
from skipjoin.recipes import RECIPES
from skipjoin.sim.hardware import parse_hardware
from skipjoin.sim.models import model_shape
from skipjoin.sim.roofline import RooflineCost, kv_blocks

_GIB = 1 << 30
# The default share of a server's RAM for the host pool.
_SWAP_SHARE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Hardware with a model, as named on a command line.

    hardware: of the catalogue, such as a100-40gb:tp8pp2, or a profile's JSON file. model: of the catalogue; None with a
    profile, which contains it. kv_gib: size of the KV pool; None: the GPU memory that the model leaves. swap_gib: size
    of the host pool; 0: none; None: half of the RAM that belongs to the GPUs, or with a profile the size of `kv_gib`.
    """

    hardware: str
    model: str | None = None
    kv_gib: float | None = None
    swap_gib: float | None = None
    block_size: int | None = None
    max_model_len: int | None = None

    def systems(
        self, recipes: str, *, slo_s: float = DEFAULT_SLO_S, starvation_s: float | None = None, **settings: Any
    ) -> list[System]:
        """A system for each recipe of a comma-separated list. settings: further fields of `System`.

        slo_s: seconds per output token that users accept. starvation_s: None: derived from `slo_s`. Raises
        `ConfigError` for unknown names, a model that does not fit, or settings out of bounds.
        """
        names = [name.strip() for name in recipes.split(",")]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ConfigError(f"recipes must differ, but {twice} is named twice")
        for name in names:
            if name not in RECIPES:
                raise unknown("recipe", name, sorted(RECIPES))
        check_slo(slo_s, starvation_s)
        check_swap_space("swap_gib", self.swap_gib)
        settings["starvation_s"] = starvation_after(slo_s) if starvation_s is None else starvation_s
        parts = self._from_profile() if self.hardware.endswith(".json") else self._from_catalogue()
        return [System(recipe=name, **(parts | settings)) for name in names]

    def _from_catalogue(self) -> dict[str, Any]:
        group = parse_hardware(self.hardware)
        if self.model is None:
            raise ConfigError(f"a model must be given for hardware {group.name}")
        shape = model_shape(self.model)
        size = 16 if self.block_size is None else self.block_size
        blocks = kv_blocks(shape, group, size, self.kv_gib)
        block_bytes = size * shape.kv_bytes_per_token
        swap_bytes = group.device.host_memory_bytes * group.gpus * _SWAP_SHARE
        return {
            "model": shape.name,
            "hardware": group.name,
            "cost": RooflineCost(shape, group, block_size=size),
            "kv_blocks": blocks,
            "host_blocks": self._host_blocks(block_bytes, swap_bytes),
            "block_bytes": block_bytes,
            "block_size": size,
            "max_model_len": self._context(shape.max_positions),
            "stages": group.pp,
        }

    def _from_profile(self) -> dict[str, Any]:
        profile = read_profile(Path(self.hardware))
        if self.model not in (None, profile.key.model):
            raise ConfigError(f"{self.hardware} is the profile of {profile.key.model}, not of model {self.model}")
        if self.block_size not in (None, profile.block_size):
            raise ConfigError(
                f"{self.hardware} was measured with block_size {profile.block_size}, not {self.block_size}"
            )
        if self.kv_gib is None:
            raise ConfigError("kv_gib must be given with a profile, which does not contain the size of the KV pool")
        check_above_zero("kv_gib", self.kv_gib, 1e6)
        return {
            "model": profile.key.model,
            "hardware": profile.key.device,
            "cost": profile.cost,
            "kv_blocks": int(self.kv_gib * _GIB) // profile.kv_bytes_per_block,
            "host_blocks": self._host_blocks(profile.kv_bytes_per_block, self.kv_gib * _GIB),
            "block_bytes": profile.kv_bytes_per_block,
            "block_size": profile.block_size,
            "max_model_len": self._context(profile.max_positions),
            "stages": profile.key.pp,
            "stage_shares": profile.stage_shares if profile.key.pp > 1 else (),
            "decision_s": profile.host_s,
        }

    def _host_blocks(self, block_bytes: int, usual_bytes: float) -> int:
        return int(usual_bytes if self.swap_gib is None else self.swap_gib * _GIB) // block_bytes

    def _context(self, most: int) -> int:
        if self.max_model_len is None:
            return most
        if not 2 <= self.max_model_len <= most:
            raise ConfigError(f"max_model_len must be in [2, {most}], the model's positions, got {self.max_model_len}")
        return self.max_model_len
