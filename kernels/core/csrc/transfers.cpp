#include "transfers.h"

#include <algorithm>

#include "errors.h"

namespace triptych {

Pairs Transfers::stores() const {
  Pairs due;
  for (size_t i = sent_stores_; i < stores_.size(); ++i) {
    due.emplace_back(stores_[i].source, stores_[i].target);
  }
  return due;
}

Pairs Transfers::loads() const {
  return {loads_.begin() + static_cast<std::ptrdiff_t>(sent_loads_), loads_.end()};
}

void Transfers::Store(std::vector<std::pair<int32_t, BlockText>> taken) {
  const auto is_kept = [this](const auto& each) { return host_.Keeps(each.second); };
  taken.erase(std::remove_if(taken.begin(), taken.end(), is_kept), taken.end());
  const size_t room = most_ - (stores_.size() - sent_stores_);
  for (size_t i = taken.size() - std::min(taken.size(), room); i < taken.size(); ++i) {
    const int32_t target = host_.BeginStore();
    if (target >= 0) stores_.push_back({taken[i].first, target, std::move(taken[i].second), true});
  }
}

void Transfers::Load(int32_t source, int32_t target) {
  loads_.emplace_back(source, target);
  is_target_[target] = 1;
}

bool Transfers::Awaits(const std::vector<int32_t>& blocks) const {
  return !loads_.empty() && std::any_of(blocks.begin(), blocks.end(),
                                        [this](int32_t block) { return is_target_[block] != 0; });
}

bool Transfers::Cancel(int32_t target) {
  if (!is_target_[target]) return false;
  const auto load = std::find_if(loads_.begin(), loads_.end(),
                                 [target](const auto& due) { return due.second == target; });
  is_target_[target] = 0;
  host_.EndLoad(load->first);
  loads_.erase(load);
  return true;
}

void Transfers::Send(size_t num_stores, size_t num_loads) {
  sent_stores_ += num_stores;
  sent_loads_ += num_loads;
}

void Transfers::Finish(size_t num_stores, size_t num_loads) {
  EndStores(num_stores, true);
  const auto end = loads_.begin() + static_cast<std::ptrdiff_t>(num_loads);
  for (auto load = loads_.begin(); load != end; ++load) {
    is_target_[load->second] = 0;
    host_.EndLoad(load->first);
  }
  loads_.erase(loads_.begin(), end);
  sent_loads_ -= num_loads;
}

void Transfers::Abandon(size_t num_stores, size_t num_loads) {
  EndStores(num_stores, false);
  sent_loads_ -= num_loads;
}

void Transfers::EndStores(size_t count, bool made) {
  for (size_t i = 0; i < count; ++i) {
    const DueStore& store = stores_[i];
    host_.EndStore(store.target, made && store.wanted ? &store.text : nullptr);
  }
  stores_.erase(stores_.begin(), stores_.begin() + static_cast<std::ptrdiff_t>(count));
  sent_stores_ -= count;
}

void Transfers::Forget(const Digest& parent, const Digest& digest, const int32_t* tokens) {
  host_.Forget(parent, digest, tokens);
  for (DueStore& store : stores_) {
    const bool same = store.text.digest == digest && store.text.parent == parent &&
                      std::equal(store.text.tokens.begin(), store.text.tokens.end(), tokens);
    if (same) store.wanted = false;
  }
}

void Transfers::Clear() {
  host_.Clear();
  for (DueStore& store : stores_) store.wanted = false;
}

void Transfers::Check() const {
  std::vector<int32_t> holders(host_.num_blocks(), 0);
  for (const DueStore& store : stores_) ++holders[store.target];
  for (const auto& load : loads_) {
    ++holders[load.first];
    Require(is_target_[load.second], "transfers: a target is unknown");
  }
  host_.Check(holders);
  Require(std::count(is_target_.begin(), is_target_.end(), 1) ==
              static_cast<std::ptrdiff_t>(loads_.size()),
          "transfers: a target has no load");
  Require(sent_stores_ <= stores_.size() && stores_.size() - sent_stores_ <= most_,
          "transfers: more stores than due, or than a step has room for");
  Require(sent_loads_ <= loads_.size() && loads_.size() - sent_loads_ <= most_,
          "transfers: more loads than due, or than a step has room for");
}

}  // namespace triptych
