#include "host_blocks.h"

#include "errors.h"

namespace triptych {

bool HostBlocks::Keeps(const BlockText& text) {
  const int32_t block = Find(text.parent, text.digest, text.tokens.data());
  if (block < 0) return false;
  if (pool_.References(block) == 0) {  // used just now
    pool_.Retain(block);
    pool_.Release(block, false);
  }
  return true;
}

int32_t HostBlocks::BeginStore() {
  if (pool_.num_free() == 0) return -1;
  const int32_t block = pool_.Allocate();
  cache_.Forget(block);
  return block;
}

void HostBlocks::EndStore(int32_t block, const BlockText* text) {
  if (text != nullptr) cache_.AddFull(block, text->digest, text->parent, text->tokens.data());
  GiveBack(block);
}

void HostBlocks::Forget(const Digest& parent, const Digest& digest, const int32_t* tokens) {
  const int32_t block = Find(parent, digest, tokens);
  if (block >= 0) Forget(block);
}

void HostBlocks::Clear() {
  for (int32_t block = num_blocks() - 1; block >= 0; --block) {
    if (cache_.Has(block)) Forget(block);
  }
}

void HostBlocks::Forget(int32_t block) {
  cache_.Forget(block);
  if (pool_.References(block) == 0) {
    pool_.Retain(block);
    GiveBack(block);
  }
}

void HostBlocks::Check(const std::vector<int32_t>& holders) const {
  pool_.Check();
  cache_.Check();
  bool kept = false;
  for (const int32_t block : pool_.FreeBlocks()) {
    Require(cache_.Has(block) || !kept, "host: an empty block is behind a kept one");
    kept = cache_.Has(block);
  }
  for (int32_t block = 0; block < num_blocks(); ++block) {
    Require(pool_.References(block) == holders[block], "host: a block is miscounted");
  }
}

}  // namespace triptych
