// Twin of engine_core/transfers.py; the contract is documented there.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "host_blocks.h"
#include "prefix_cache.h"

namespace triptych {

using Pairs = std::vector<std::pair<int32_t, int32_t>>;  // (source, target)

class Transfers {
 public:
  Transfers(int32_t num_host_blocks, int32_t num_blocks, int32_t block_size, size_t most)
      : host_(num_host_blocks, block_size), most_(most), is_target_(num_blocks) {}

  HostBlocks& host() { return host_; }
  const HostBlocks& host() const { return host_; }

  size_t num_loads_left() const { return most_ - (loads_.size() - sent_loads_); }
  Pairs stores() const;  // of the next step
  Pairs loads() const;

  void Store(std::vector<std::pair<int32_t, BlockText>> taken);
  void Load(int32_t source, int32_t target);  // the source is held
  bool Awaits(const std::vector<int32_t>& blocks) const;
  bool Cancel(int32_t target);

  void Send(size_t num_stores, size_t num_loads);
  void Finish(size_t num_stores, size_t num_loads);
  void Abandon(size_t num_stores, size_t num_loads);

  void Forget(const Digest& parent, const Digest& digest, const int32_t* tokens);
  void Clear();
  void Check() const;

 private:
  struct DueStore {
    int32_t source;
    int32_t target;
    BlockText text;
    bool wanted;
  };

  void EndStores(size_t count, bool made);

  HostBlocks host_;
  size_t most_;
  std::vector<DueStore> stores_;
  Pairs loads_;
  size_t sent_stores_ = 0, sent_loads_ = 0;  // the first ones are made by steps in flight
  std::vector<uint8_t> is_target_;           // of a load, by device block
};

}  // namespace triptych
