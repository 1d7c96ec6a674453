#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bindings_plan.h"
#include "bindings_sampler.h"
#include "dispatch.h"
#include "philox.h"

namespace py = pybind11;

PYBIND11_MODULE(_cpu, m) {
  m.doc() = "CPU kernels, one variant per instruction set";
  m.def("philox4x32", &triptych::philox4x32, py::arg("counter"), py::arg("key0"), py::arg("key1"));
  m.def("active_isa", [] { return triptych::active_kernels().name; });
  m.def("supported_isas", &triptych::supported_isas);
  m.def("select_isa", &triptych::select_isa, py::arg("name"));
  triptych::bind_sampler(m);
  triptych::bind_plan(m);
  triptych::bind_ops(m);
  triptych::bind_matmul(m);
}
