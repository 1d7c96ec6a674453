#include "batch.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <unordered_set>
#include <utility>

#include "errors.h"

namespace triptych {

Batch::Batch(int32_t num_blocks, int32_t block_size, const SlotLayout& layout, bool prefix_caching,
             int32_t num_host_blocks)
    : tables_(num_blocks, block_size, num_host_blocks, layout.max_transfers),
      writer_(layout, block_size),
      prefix_caching_(prefix_caching) {}

// ------------------------------------------------------------------ the prefix cache

std::vector<Digest> Batch::PrefixDigests(const std::vector<int32_t>& tokens,
                                         std::string_view salt) const {
  std::vector<Digest> chain;
  if (!prefix_caching_) return chain;
  const auto size = static_cast<size_t>(tables_.block_size());
  chain.reserve(1 + tokens.size() / size);
  chain.push_back(Blake2b128(nullptr, 0, salt.data(), salt.size()));
  for (size_t end = size; end <= tokens.size(); end += size) {
    chain.push_back(BlockDigest(chain.back(), tokens.data() + end - size, size));
  }
  return chain;
}

std::vector<Digest> Batch::Split(std::string_view digests, size_t num_tokens) const {
  const size_t count = 1 + num_tokens / static_cast<size_t>(tables_.block_size());
  if (num_tokens < 1 || digests.size() != count * kDigestBytes) {
    throw std::invalid_argument("digests: " + std::to_string(digests.size()) + " bytes, " +
                                std::to_string(count * kDigestBytes) + " are those of " +
                                std::to_string(num_tokens) + " tokens");
  }
  std::vector<Digest> chain(count);
  std::memcpy(chain.data(), digests.data(), digests.size());
  return chain;
}

Hit Batch::Lookup(const std::vector<int32_t>& tokens, const std::vector<Digest>& chain) const {
  const PrefixCache& cache = tables_.cache();
  const Transfers* transfers = tables_.transfers();
  const auto size = static_cast<size_t>(tables_.block_size());
  const size_t most =
      tokens.size() - 1;  // the last token is always computed: its logits are wanted
  Hit hit;
  for (size_t i = 0; i < most / size; ++i) {
    const int32_t* own = tokens.data() + i * size;
    const int32_t block = cache.FindFull(chain[i + 1], chain[i], own);
    if (block >= 0) {
      hit.blocks.push_back(block);
      continue;
    }
    const bool room = transfers != nullptr && hit.loads.size() < transfers->num_loads_left();
    const int32_t kept = room ? transfers->host().Find(chain[i], chain[i + 1], own) : -1;
    if (kept < 0) break;
    hit.loads.push_back({static_cast<int32_t>(i), kept, &chain[i], own});
  }
  const size_t start = hit.num_whole() * size;
  const auto rest = static_cast<int32_t>(std::min(size, most - start));
  const PartialHit partial = cache.FindPartial(chain[hit.num_whole()], tokens.data() + start, rest);
  hit.source = partial.block;
  hit.copied = partial.num_tokens;
  return hit;
}

Match Batch::Match(const std::vector<int32_t>& tokens, std::string_view digests) const {
  if (!prefix_caching_) return {0, 0};
  const std::vector<Digest> chain = Split(digests, tokens.size());
  const auto size = static_cast<int64_t>(tables_.block_size());
  const Hit hit = Lookup(tokens, chain);
  const int64_t computed = static_cast<int64_t>(hit.num_whole()) * size + hit.copied;
  size_t end = hit.num_whole();
  while (end + 1 < chain.size() && pending_.Find(chain[end + 1]) != nullptr) ++end;
  const int64_t reach =
      std::min(static_cast<int64_t>(end) * size, static_cast<int64_t>(tokens.size()) - 1);
  return {computed, std::max<int64_t>(0, reach - computed)};
}

void Batch::AddPending(const RunningSequence& sequence, size_t from, size_t to) {
  for (size_t i = from; i < to; ++i) ++*pending_.Insert(sequence.digests[i + 1], 0).first;
}

void Batch::DropPending(const RunningSequence& sequence, size_t from, size_t to) {
  for (size_t i = from; i < to; ++i) {
    int32_t* count = pending_.Find(sequence.digests[i + 1]);
    if (--*count == 0) pending_.Erase(sequence.digests[i + 1]);
  }
}

void Batch::DropPending(const RunningSequence& sequence) {
  if (!sequence.cached) return;
  DropPending(sequence, static_cast<size_t>(sequence.num_computed / tables_.block_size()),
              sequence.digests.size() - 1);
}

void Batch::CeaseCaching(RunningSequence* sequence) {
  if (!sequence->closed) DropPending(*sequence);
  sequence->cached = false;
  sequence->digests.clear();
}

void Batch::ForgetCache() {
  tables_.ForgetAll();
  for (RunningSequence* sequence : order_) CeaseCaching(sequence);
  for (const Owned& sequence : step_.closing) CeaseCaching(sequence.get());
  for (const Owned& sequence : ahead_.closing) CeaseCaching(sequence.get());
}

// ------------------------------------------------------------------ sequences

RunningSequence& Batch::Find(int64_t id) {
  const auto found = by_id_.find(id);
  if (found == by_id_.end()) throw UnknownSequence(std::to_string(id));
  return *found->second;
}

const RunningSequence& Batch::Get(int64_t id) const { return const_cast<Batch*>(this)->Find(id); }

void Batch::CheckNew(int64_t id, int64_t place) const {
  if (by_id_.count(id) != 0) {
    throw BrokenInvariant("sequence " + std::to_string(id) + " is open");
  }
  if (place < 0 || place > static_cast<int64_t>(order_.size())) {
    throw BrokenInvariant("place: " + std::to_string(place) + " of " +
                          std::to_string(order_.size()));
  }
}

int64_t Batch::Open(int64_t id, std::vector<int32_t> tokens, std::string_view digests,
                    SequenceRules rules, int64_t place, int64_t spare_blocks) {
  Require(!step_.written, "open: the step is written");
  Require(!tokens.empty(), "open: no tokens");
  CheckNew(id, place);
  auto sequence = std::make_unique<RunningSequence>();
  sequence->id = id;
  sequence->cached = rules.cached && prefix_caching_;
  if (sequence->cached) sequence->digests = Split(digests, tokens.size());
  const bool looked_up = sequence->cached && !rules.score_prompt;
  Hit hit;
  if (looked_up) hit = Lookup(tokens, sequence->digests);
  const auto num_tokens = static_cast<int32_t>(tokens.size());
  if (!tables_.Open(num_tokens, hit, spare_blocks, &sequence->table)) {
    // The source of a copy takes one block more; without it there may be room.
    if (hit.source < 0) return -1;
    hit.source = -1;
    hit.copied = 0;
    if (!tables_.Open(num_tokens, hit, spare_blocks, &sequence->table)) return -1;
  }
  sequence->num_computed =
      static_cast<int32_t>(hit.num_whole()) * tables_.block_size() + hit.copied;
  host_hits_total_ += static_cast<int64_t>(hit.loads.size()) * tables_.block_size();
  if (looked_up) {
    prefix_queries_total_ += num_tokens;
    prefix_hits_total_ += sequence->num_computed;
  }
  sequence->tokens = std::move(tokens);
  sequence->rules = std::move(rules);
  const int64_t computed = sequence->num_computed;
  Enter(std::move(sequence), place);
  return computed;
}

void Batch::Fork(int64_t id, int64_t new_id, SequenceRules rules, int64_t place) {
  const RunningSequence& parent = Find(id);
  Require(!ahead_.in_flight() && !step_.ahead, "fork: a step in flight was planned ahead");
  CheckNew(new_id, place);
  // Else the other one could take its drafts and end, and leave this one to write to full blocks.
  if (parent.row != kNoRow && step_.rows[parent.row].num_drafts > 0) {
    throw BrokenInvariant("fork: sequence " + std::to_string(id) + " has drafts in the step");
  }
  auto sequence = std::make_unique<RunningSequence>();
  sequence->id = new_id;
  sequence->cached = parent.cached && rules.cached;
  if (sequence->cached) sequence->digests = parent.digests;
  sequence->rules = std::move(rules);
  sequence->tokens = parent.tokens;
  sequence->num_computed = parent.num_computed;
  tables_.Share(parent.table, &sequence->table);
  if (parent.row != kNoRow) step_.Ride(sequence.get(), parent.row);
  Enter(std::move(sequence), place);
}

void Batch::Enter(Owned sequence, int64_t place) {
  order_.insert(order_.begin() + place, sequence.get());
  if (sequence->cached) {
    AddPending(*sequence, static_cast<size_t>(sequence->num_computed / tables_.block_size()),
               sequence->digests.size() - 1);
  }
  const int64_t id = sequence->id;
  by_id_.emplace(id, std::move(sequence));
}

void Batch::Append(int64_t id, int64_t token) {
  RunningSequence& sequence = Find(id);
  Require(sequence.rules.held, "append: the sequence is not held");
  Require(!step_.in_flight(), "append: a step is in flight");
  sequence.tokens.push_back(Narrow(token));
  ExtendDigests(&sequence);
}

void Batch::Close(int64_t id) {
  RunningSequence& sequence = Find(id);
  DropPending(sequence);
  sequence.closed = true;
  order_.erase(std::find(order_.begin(), order_.end(), &sequence));
  const auto entry = by_id_.find(id);
  // Without a row it may still have a copy; in a step ahead only rows have.
  if (sequence.ahead_row != kNoRow) {
    ahead_.closing.push_back(std::move(entry->second));
  } else if (sequence.row != kNoRow || (step_.in_flight() && !step_.ahead)) {
    step_.closing.push_back(std::move(entry->second));
  } else {
    Release(sequence);
  }
  by_id_.erase(entry);
}

void Batch::Release(const RunningSequence& sequence) {
  const int32_t size = tables_.block_size();
  const int32_t whole = sequence.num_computed / size;
  if (sequence.cached && sequence.num_computed % size != 0) {
    tables_.KeepPartial(sequence.table, sequence.num_computed, sequence.digests[whole],
                        sequence.tokens.data() + static_cast<size_t>(whole) * size);
  }
  tables_.Release(sequence.table);
}

void Batch::ReleaseClosing(const std::vector<Owned>& closing) {
  for (const Owned& sequence : closing) Release(*sequence);
}

// ------------------------------------------------------------------ facts

int64_t Batch::NumUnusedSlots() const {
  std::unordered_set<int32_t> seen;
  int64_t unused = 0;
  for (const RunningSequence* sequence : order_) {
    const auto& blocks = sequence->table.blocks;
    if (!seen.insert(blocks.back()).second) continue;
    unused += std::max<int64_t>(
        0, static_cast<int64_t>(blocks.size()) * tables_.block_size() - sequence->num_tokens());
  }
  return unused;
}

void Batch::Check() const {
  std::vector<const BlockTable*> tables;
  std::vector<const RunningSequence*> sequences(order_.begin(), order_.end());
  for (const Owned& sequence : step_.closing) sequences.push_back(sequence.get());
  for (const Owned& sequence : ahead_.closing) sequences.push_back(sequence.get());
  DigestMap pending;
  const auto size = static_cast<size_t>(tables_.block_size());
  for (const RunningSequence* sequence : sequences) {
    tables.push_back(&sequence->table);
    Require(sequence->num_computed <= sequence->num_tokens(), "batch: more computed than tokens");
    Require(sequence->num_computed <= static_cast<int64_t>(sequence->table.blocks.size() * size),
            "batch: a computed token has no block");
    int32_t end = sequence->num_tokens();
    if (sequence->row != kNoRow) end = std::max(end, step_.rows[sequence->row].end());
    if (sequence->ahead_row != kNoRow) end = std::max(end, ahead_.rows[sequence->ahead_row].end());
    Require(static_cast<int32_t>(sequence->table.blocks.size()) <= tables_.BlocksFor(end),
            "batch: a table is longer than its tokens and what is computed behind them");
    Require(guessed_ || sequence->guesses.empty(), "batch: guesses outlive their step");
    Require(sequence->digests.size() == (sequence->cached ? 1 + sequence->tokens.size() / size : 0),
            "batch: digests are not those of the whole blocks");
    if (!sequence->cached || sequence->closed) continue;
    for (size_t i = 1 + sequence->num_computed / size; i < sequence->digests.size(); ++i) {
      ++*pending.Insert(sequence->digests[i], 0).first;
    }
  }
  tables_.Check(tables);
  Require(by_id_.size() == order_.size(), "batch: ids and order differ");
  Require(pending.size() == pending_.size(), "batch: pending is miscounted");
  pending.ForEach([this](const Digest& digest, int32_t count) {
    const int32_t* counted = pending_.Find(digest);
    Require(counted != nullptr && *counted == count, "batch: pending is miscounted");
  });
  Require(step_.closing.empty() || step_.in_flight(), "batch: closed sequences outlive the step");
  Require(ahead_.closing.empty() || ahead_.in_flight(), "batch: closed sequences outlive the step");
  Require(!ahead_.in_flight() || step_.written, "batch: a step is ahead of none");
}

}  // namespace triptych
