"""`quantization_config` of a Hugging Face folder -> Quantization.

Refuses by name whatever would be computed otherwise than it was meant: another method, other
widths, overrides for single modules.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from triptych.services.runtime.lifecycle import StartupError

Storage = Literal["gptq", "awq", "packed", "int8", "float8", "float8_inverse"]

SUPPORTED = (
    "gptq with 4 or 8 bits, awq with 4 bits in its gemm layout, fp8 (e4m3), and compressed-tensors "
    "pack-quantized or int-quantized with 4 or 8 bits, or float-quantized with 8, are"
)

_MAX_GROUP = 1 << 20


@dataclass(frozen=True, slots=True)
class Quantization:
    """How linear layers are stored: integer codes, and a scale and zero point per group.

    Which layers are is what the files say: one whose plain weight is there was not converted.
    `group_size`: columns of a group; None when it is a whole row. `zero_shift` is added to stored
    zero points. `symmetric`: there are none, and zero is the middle code. `act_order`: a table
    says which group a column is of. Of e4m3 floats ("float8", "float8_inverse": by what their
    scales are called) `block`: rows and columns that share a scale; None: all columns do.
    """

    source: str
    storage: Storage
    bits: Literal[4, 8]
    group_size: int | None
    zero_shift: int = 0
    symmetric: bool = False
    act_order: bool = False
    block: tuple[int, int] | None = None

    def refused(self, why: str) -> StartupError:
        """The error to raise when weights are not as the config says."""
        return StartupError(f"{self.source}: {why}")


def read_quantization(source: str, value: object) -> Quantization | None:
    """Read the value of the key; None when there is none.

    Raises StartupError naming the method, and what is supported.
    """
    if value is None:
        return None
    source = f"{source}: quantization_config"
    if not isinstance(value, dict):
        raise StartupError(f"{source}: {value!r:.60} is not an object")
    reader = _Reader(source, value)
    match value.get("quant_method"):
        case "gptq":
            return reader.gptq()
        case "awq":
            return reader.awq()
        case "compressed-tensors":
            return reader.compressed_tensors()
        case "fp8":
            return reader.fp8()
        case other:
            raise StartupError(
                f"{source}: quant_method {other!r:.60} is not supported ({SUPPORTED})"
            )


class _Reader:
    def __init__(self, source: str, fields: Mapping[str, object]) -> None:
        self._source = source
        self._fields = fields

    def gptq(self) -> Quantization:
        stored = self._fields.get("checkpoint_format", "gptq")
        if stored not in ("gptq", "gptq_v2"):
            raise self._unsupported("checkpoint_format", stored)
        self._refuse_set("is_marlin_format", "dynamic")
        if self._fields.get("pack_dtype", "int32") != "int32":
            raise self._unsupported("pack_dtype", self._fields["pack_dtype"])
        return Quantization(
            source=self._source,
            storage="gptq",
            bits=self._bits("bits", (4, 8)),
            group_size=self._group_size("group_size"),
            # The first format's packer stored zero points less one.
            zero_shift=1 if stored == "gptq" else 0,
            act_order=self._flag("desc_act"),
        )

    def awq(self) -> Quantization:
        version = self._fields.get("version", "gemm")
        if not isinstance(version, str) or version.lower() != "gemm":
            raise self._unsupported("version", version)
        return Quantization(
            source=self._source,
            storage="awq",
            bits=self._bits("bits", (4,)),
            group_size=self._group_size("group_size"),
        )

    def compressed_tensors(self) -> Quantization:
        self._refuse_set("kv_cache_scheme")
        sparsity = self._fields.get("sparsity_config")
        if isinstance(sparsity, dict) and sparsity.get("format", "dense") != "dense":
            raise self._unsupported("sparsity_config", sparsity)
        group, weights = self._only_group()
        stored = self._fields.get("format")
        if stored not in ("pack-quantized", "int-quantized", "float-quantized"):
            raise self._unsupported("format", stored)
        floats = stored == "float-quantized"
        if group._fields.get("targets", ["Linear"]) != ["Linear"]:
            raise group._unsupported("targets", group._fields["targets"])
        for name in ("input_activations", "output_activations"):
            scheme = group._fields.get(name)
            # Rounding activations as they come is a way to compute; a stored scale is a number.
            if isinstance(scheme, dict) and scheme.get("dynamic") is not True:
                raise group._unsupported(name, scheme)
        kind = weights._fields.get("type", "int")
        if kind != ("float" if floats else "int"):
            raise weights._unsupported("type", kind)
        if weights._flag("dynamic"):
            raise weights._unsupported("dynamic", True)
        if floats:
            return weights._float8()
        packed = stored == "pack-quantized"
        return Quantization(
            source=self._source,
            storage="packed" if packed else "int8",
            bits=weights._bits("num_bits", (4, 8) if packed else (8,)),
            group_size=weights._group_of_strategy(),
            symmetric=weights._flag("symmetric", default=True),
            act_order=weights._fields.get("actorder") in ("group", "dynamic"),
        )

    def fp8(self) -> Quantization:
        if self._fields.get("fmt", "e4m3") != "e4m3":
            raise self._unsupported("fmt", self._fields["fmt"])
        scheme = self._fields.get("activation_scheme", "dynamic")
        if scheme != "dynamic":
            raise self._unsupported("activation_scheme", scheme)
        size = self._fields.get("weight_block_size")
        block = None if size is None else self._block("weight_block_size")
        storage: Storage = "float8" if block is None else "float8_inverse"
        return Quantization(self._source, storage, 8, None, symmetric=True, block=block)

    def _float8(self) -> Quantization:
        """What a scheme of compressed-tensors says of floats."""
        self._bits("num_bits", (8,))
        if not self._flag("symmetric", default=True):
            raise self._unsupported("symmetric", False)
        strategy = self._fields.get("strategy")
        if strategy not in ("tensor", "channel", "block"):
            raise self._unsupported("strategy", strategy)
        block = self._block("block_structure") if strategy == "block" else None
        return Quantization(self._source, "float8", 8, None, symmetric=True, block=block)

    def _block(self, key: str) -> tuple[int, int]:
        match self._fields.get(key):
            case [int(rows), int(columns)] if (
                min(rows, columns) >= 1 and max(rows, columns) <= _MAX_GROUP
            ):
                return rows, columns
            case other:
                raise self._unsupported(key, other)

    def _only_group(self) -> tuple["_Reader", "_Reader"]:
        """The one scheme that all layers follow, and what it says of weights."""
        groups = self._fields.get("config_groups")
        if not isinstance(groups, dict) or len(groups) != 1:
            raise self._unsupported("config_groups", groups)
        ((name, group),) = groups.items()
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict):
            raise self._unsupported("config_groups", groups)
        source = f"{self._source}: {name!s:.40}"
        return _Reader(source, group), _Reader(f"{source}: weights", weights)

    def _group_of_strategy(self) -> int | None:
        strategy = self._fields.get("strategy")
        if strategy == "channel":
            return None
        if strategy != "group":
            raise self._unsupported("strategy", strategy)
        return self._group_size("group_size")

    def _bits(self, key: str, known: Iterable[Literal[4, 8]]) -> Literal[4, 8]:
        value = self._fields.get(key)
        for bits in known:
            if value == bits and isinstance(value, int):
                return bits
        raise self._unsupported(key, value)

    def _group_size(self, key: str) -> int | None:
        value = self._fields.get(key)
        if value == -1:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MAX_GROUP:
            raise StartupError(
                f"{self._source}: {key} {value!r:.60} is not -1 or within 1 and {_MAX_GROUP}"
            )
        return value

    def _flag(self, key: str, *, default: bool = False) -> bool:
        value = self._fields.get(key, default)
        if not isinstance(value, bool):
            raise StartupError(f"{self._source}: {key} {value!r:.60} is not true or false")
        return value

    def _refuse_set(self, *keys: str) -> None:
        for key in keys:
            if self._fields.get(key):
                raise self._unsupported(key, self._fields[key])

    def _unsupported(self, key: str, value: object) -> StartupError:
        return StartupError(f"{self._source}: {key} {value!r:.60} is not supported ({SUPPORTED})")
