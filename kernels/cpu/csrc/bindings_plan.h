#pragma once
#include <pybind11/pybind11.h>

#include <string>

#include "attention.h"
#include "elementwise.h"

namespace triptych {

// Adds the plan, and packing into given memory, to the module.
void bind_plan(pybind11::module_& m);

// Adds the plan's kernels, for tests and benchmarks.
void bind_ops(pybind11::module_& m);

// Adds matrix products and the machine's limits, for tests and benchmarks.
void bind_matmul(pybind11::module_& m);

// By name. Both throw ValueError.
KvType kv_type_of(const std::string& name);
Activation activation_of(const std::string& name);

}  // namespace triptych
