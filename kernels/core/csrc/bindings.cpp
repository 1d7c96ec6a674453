// The Python face: converts arguments and results, names errors.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "arguments.h"
#include "batch.h"
#include "errors.h"

namespace py = pybind11;

namespace triptych {
namespace {

// A named tuple of triptych.kernels.core.values. Types outlive the interpreter's modules: they are
// looked up once and kept.
template <typename... Fields>
py::object MakeValue(PyObject*& type, const char* name, Fields&&... fields) {
  if (type == nullptr) {
    type =
        py::object(py::module_::import("triptych.kernels.core.values").attr(name)).release().ptr();
  }
  return py::handle(type)(std::forward<Fields>(fields)...);
}

// engine_core/batch.py SequenceRules: a tuple, its fields in order.
SequenceRules ReadRules(const py::tuple& fields) {
  if (fields.size() != 8) throw py::type_error("rules: expected the fields of SequenceRules");
  SequenceRules rules;
  rules.request_id = fields[0].cast<int64_t>();
  rules.num_prompt = fields[1].cast<int64_t>();
  rules.max_tokens = fields[2].cast<int64_t>();
  rules.max_len = fields[3].cast<int64_t>();
  rules.stop_token_ids = fields[4].cast<std::vector<int64_t>>();
  std::sort(rules.stop_token_ids.begin(), rules.stop_token_ids.end());
  rules.held = fields[5].cast<bool>();
  rules.score_prompt = fields[6].cast<bool>();
  rules.cached = fields[7].cast<bool>();
  return rules;
}

// engine_core/layout.py StepLayout
SlotLayout ReadLayout(const py::object& layout) {
  const py::object arrays = layout.attr("arrays");
  const auto extent = [&](const char* name) { return layout.attr(name).cast<size_t>(); };
  const auto offset = [&](const char* name) {
    return arrays[name].cast<std::pair<size_t, py::object>>().first;
  };
  SlotLayout slot{};
  slot.max_tokens = extent("max_tokens");
  slot.max_rows = extent("max_rows");
  slot.max_blocks_per_row = extent("max_blocks_per_row");
  slot.max_logits = extent("max_logits");
  slot.max_transfers = extent("max_transfers");
  slot.slot_bytes = extent("slot_bytes");
  slot.token_ids = offset("token_ids");
  slot.positions = offset("positions");
  slot.slots = offset("slots");
  slot.row_starts = offset("row_starts");
  slot.kv_lengths = offset("kv_lengths");
  slot.logits_tokens = offset("logits_tokens");
  slot.copy_sources = offset("copy_sources");
  slot.copy_targets = offset("copy_targets");
  slot.block_tables = offset("block_tables");
  slot.store_sources = offset("store_sources");
  slot.store_targets = offset("store_targets");
  slot.load_sources = offset("load_sources");
  slot.load_targets = offset("load_targets");
  return slot;
}

py::tuple SampleColumns(Batch& batch) {
  const std::vector<Sample>& samples = batch.Samples();
  auto [ids, id] = NewArray<int64_t>(samples.size());
  auto [logits_rows, logits_row] = NewArray<int32_t>(samples.size());
  for (const Sample& sample : samples) {
    *id++ = sample.sequence->id;
    *logits_row++ = sample.logits_row;
  }
  return py::make_tuple(std::move(ids), std::move(logits_rows));
}

py::object DraftColumn(Batch& batch) {
  const std::vector<Sample>& samples = batch.Samples();
  auto [drafts, draft] = NewArray<int32_t>(samples.size());
  for (const Sample& sample : samples) *draft++ = sample.draft;
  return std::move(drafts);
}

py::object OutcomeColumns(const Outcome& outcome) {
  static PyObject* type = nullptr;
  return MakeValue(type, "Outcome", MakeArray(outcome.samples), MakeArray(outcome.request_ids),
                   MakeArray(outcome.token_ids), MakeArray(outcome.finishes), outcome.finished,
                   outcome.finished_tokens);
}

py::tuple SampleColumnsAhead(Batch& batch) {
  const std::vector<Sample>& samples = batch.SamplesAhead();
  auto [ids, id] = NewArray<int64_t>(samples.size());
  auto [logits_rows, logits_row] = NewArray<int32_t>(samples.size());
  auto [previous, sample_before] = NewArray<int32_t>(samples.size());
  for (const Sample& sample : samples) {
    *id++ = sample.sequence->id;
    *logits_row++ = sample.logits_row;
    *sample_before++ = batch.ahead().rows[sample.sequence->ahead_row].previous;
  }
  return py::make_tuple(std::move(ids), std::move(logits_rows), std::move(previous));
}

std::vector<int64_t> ReadIds(const py::object& ids) {
  std::vector<int64_t> found;
  for (const py::handle id : py::iter(ids)) found.push_back(id.cast<int64_t>());
  std::sort(found.begin(), found.end());
  return found;
}

py::list ScoreList(const PlannedStep& step) {
  static PyObject* type = nullptr;
  py::list scores;
  for (const Score& score : Batch::Scores(step)) {
    scores.append(MakeValue(type, "Score", score.sequence_id, score.logits_row, score.position,
                            score.num_positions));
  }
  return scores;
}

py::list RowList(const PlannedStep& step) {
  static PyObject* type = nullptr;
  py::list rows;
  for (const Row& row : step.rows) {
    rows.append(MakeValue(type, "ScheduledSequence", row.sequence->id, row.start, row.width(),
                          row.samples));
  }
  return rows;
}

py::list CopyList(const Batch& batch) {
  py::list copies;
  for (const auto& [target, source] : batch.tables().copies()) {
    copies.append(py::make_tuple(source, target));
  }
  return copies;
}

// Of the next step.
Pairs DueStores(const Batch& batch) {
  const Transfers* transfers = batch.tables().transfers();
  return transfers == nullptr ? Pairs() : transfers->stores();
}

Pairs DueLoads(const Batch& batch) {
  const Transfers* transfers = batch.tables().transfers();
  return transfers == nullptr ? Pairs() : transfers->loads();
}

py::list SequenceIds(const Batch& batch) {
  py::list ids;
  for (const RunningSequence* sequence : batch.order()) ids.append(sequence->id);
  return ids;
}

void RegisterErrors() {
  py::register_local_exception_translator([](std::exception_ptr thrown) {
    try {
      if (thrown) std::rethrow_exception(thrown);
    } catch (const BrokenInvariant& error) {
      py::set_error(PyExc_AssertionError, error.what());
    } catch (const UnknownSequence& error) {
      py::set_error(PyExc_KeyError, error.what());
    }
  });
}

using BatchClass = py::class_<Batch>;

void BindSequences(BatchClass& type) {
  type.def(
          "prefix_digests",
          [](const Batch& self, const py::object& token_ids, const py::bytes& salt) {
            const auto chain = self.PrefixDigests(ReadTokens(token_ids), ReadBytes(salt));
            return py::bytes(reinterpret_cast<const char*>(chain.data()),
                             chain.size() * kDigestBytes);
          },
          py::arg("token_ids"), py::arg("salt"))
      .def(
          "match",
          [](const Batch& self, const py::object& token_ids, const py::bytes& digests) {
            static PyObject* type = nullptr;
            const Match match = self.Match(ReadTokens(token_ids), ReadBytes(digests));
            return MakeValue(type, "Match", match.computed, match.pending);
          },
          py::arg("token_ids"), py::arg("digests"))
      .def(
          "open",
          [](Batch& self, int64_t sequence_id, const py::object& token_ids,
             const py::bytes& digests, const py::tuple& rules, int64_t place,
             int64_t spare_blocks) {
            return self.Open(sequence_id, ReadTokens(token_ids), ReadBytes(digests),
                             ReadRules(rules), place, spare_blocks);
          },
          py::arg("sequence_id"), py::arg("token_ids"), py::arg("digests"), py::arg("rules"),
          py::arg("place"), py::arg("spare_blocks"))
      .def(
          "fork",
          [](Batch& self, int64_t sequence_id, int64_t new_id, const py::tuple& rules,
             int64_t place) { self.Fork(sequence_id, new_id, ReadRules(rules), place); },
          py::arg("sequence_id"), py::arg("new_id"), py::arg("rules"), py::arg("place"))
      .def("append", &Batch::Append, py::arg("sequence_id"), py::arg("token_id"))
      .def("close", &Batch::Close, py::arg("sequence_id"))
      .def("forget_cache", &Batch::ForgetCache)
      .def(
          "draft",
          [](Batch& self, int64_t sequence_id, const py::object& token_ids) {
            self.Draft(sequence_id, ReadTokens(token_ids));
          },
          py::arg("sequence_id"), py::arg("token_ids"));
}

void BindStep(BatchClass& type) {
  type.def("plan", &Batch::Plan, py::arg("budget"), py::arg("most_per_sequence"),
           py::arg("logits_budget"))
      .def("schedule", &Batch::Schedule, py::arg("sequence_id"), py::arg("most"))
      .def_property_readonly("num_tokens", [](const Batch& self) { return self.step().num_tokens; })
      .def_property_readonly("num_rows", [](const Batch& self) { return self.step().rows.size(); })
      .def_property_readonly("num_logits", [](const Batch& self) { return self.step().num_logits; })
      .def("rows", [](const Batch& self) { return RowList(self.step()); })
      .def("copies", &CopyList)
      .def("stores", &DueStores)
      .def("loads", &DueLoads)
      .def("samples", &SampleColumns)
      .def("drafts", &DraftColumn)
      .def(
          "fill_drafts",
          [](Batch& self, const py::object& token_ids) { self.FillDrafts(ReadTokens(token_ids)); },
          py::arg("token_ids"))
      .def("scores", [](const Batch& self) { return ScoreList(self.step()); })
      .def(
          "plan_ahead",
          [](Batch& self, const py::object& host_drawn, int64_t budget, int64_t most_per_sequence,
             int64_t logits_budget) {
            static PyObject* type = nullptr;
            const Extent extent =
                self.PlanAhead(ReadIds(host_drawn), budget, most_per_sequence, logits_budget);
            return MakeValue(type, "Extent", extent.num_rows, extent.num_tokens, extent.num_logits);
          },
          py::arg("host_drawn"), py::arg("budget"), py::arg("most_per_sequence"),
          py::arg("logits_budget"))
      .def("rows_ahead", [](const Batch& self) { return RowList(self.ahead()); })
      .def("samples_ahead", &SampleColumnsAhead)
      .def("scores_ahead", [](const Batch& self) { return ScoreList(self.ahead()); })
      .def(
          "write",
          [](Batch& self, const py::object& slot, uint64_t step_id) {
            const Bytes bytes(slot, PyBUF_WRITABLE | PyBUF_C_CONTIGUOUS);
            self.Write(bytes.data(), bytes.size(), step_id);
          },
          py::arg("slot"), py::arg("step_id"))
      .def(
          "apply",
          [](Batch& self, const py::object& token_ids, const py::object& complete) {
            return OutcomeColumns(self.Apply(ReadTokens(token_ids), ReadTokens(complete)));
          },
          py::arg("token_ids"), py::arg("complete") = py::tuple())
      .def("abandon", &Batch::Abandon);
}

void BindFacts(BatchClass& type) {
  type.def_property_readonly("num_blocks",
                             [](const Batch& self) { return self.tables().pool().num_blocks(); })
      .def_property_readonly("block_size",
                             [](const Batch& self) { return self.tables().block_size(); })
      .def_property_readonly("num_free_blocks",
                             [](const Batch& self) { return self.tables().pool().num_free(); })
      .def_property_readonly("num_cached_blocks",
                             [](const Batch& self) { return self.tables().cache().size(); })
      .def_property_readonly("num_host_blocks",
                             [](const Batch& self) {
                               const Transfers* transfers = self.tables().transfers();
                               return transfers == nullptr ? 0 : transfers->host().num_blocks();
                             })
      .def_property_readonly("num_host_blocks_used",
                             [](const Batch& self) {
                               const Transfers* transfers = self.tables().transfers();
                               return transfers == nullptr ? 0 : transfers->host().num_used();
                             })
      .def_property_readonly("num_unused_slots", &Batch::NumUnusedSlots)
      .def_property_readonly("prefix_queries_total", &Batch::prefix_queries_total)
      .def_property_readonly("prefix_hits_total", &Batch::prefix_hits_total)
      .def_property_readonly("host_hits_total", &Batch::host_hits_total)
      .def("sequence_ids", &SequenceIds)
      .def(
          "token_ids", [](const Batch& self, int64_t id) { return self.Get(id).tokens; },
          py::arg("sequence_id"))
      .def(
          "num_computed", [](const Batch& self, int64_t id) { return self.Get(id).num_computed; },
          py::arg("sequence_id"))
      .def(
          "table", [](const Batch& self, int64_t id) { return self.Get(id).table.blocks; },
          py::arg("sequence_id"))
      .def("free_blocks", [](const Batch& self) { return self.tables().pool().FreeBlocks(); })
      .def("check", &Batch::Check);
}

}  // namespace
}  // namespace triptych

PYBIND11_MODULE(_core, m) {
  using triptych::Batch;
  m.doc() = "C++ twin of triptych.engine_core.python_batch.";
  triptych::RegisterErrors();
  py::class_<Batch> type(m, "Batch");
  type.def(py::init([](int32_t num_blocks, int32_t block_size, const py::object& layout,
                       bool prefix_caching, int32_t num_host_blocks) {
             return Batch(num_blocks, block_size, triptych::ReadLayout(layout), prefix_caching,
                          num_host_blocks);
           }),
           py::arg("num_blocks"), py::arg("block_size"), py::arg("layout"),
           py::arg("prefix_caching") = true, py::arg("num_host_blocks") = 0);
  triptych::BindSequences(type);
  triptych::BindStep(type);
  triptych::BindFacts(type);
}
