"""CPU kernels: one C++ module, a variant per instruction set; the best one until told another."""

from triptych.kernels.cpu._cpu import active_isa, select_isa, supported_isas

__all__ = ["active_isa", "select_isa", "supported_isas"]
