// BLAKE2b with a 128-bit digest and no key (RFC 7693): hashlib.blake2b(data, digest_size=16).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace triptych {

constexpr size_t kDigestBytes = 16;
using Digest = std::array<uint8_t, kDigestBytes>;

// Of `first` and then `second`, as if they were one text: no copy is made of either.
Digest Blake2b128(const void* first, size_t first_bytes, const void* second, size_t second_bytes);

}  // namespace triptych
