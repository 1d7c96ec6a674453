#pragma once
#include <pybind11/pybind11.h>

namespace triptych {

// Adds the stateful sampler to the module.
void bind_sampler(pybind11::module_& m);

}  // namespace triptych
