// CRC32C (Castagnoli polynomial 0x1EDC6F41, reflected, initial value and final xor 0xFFFFFFFF): the
// checksum of iSCSI, ext4 and of every record and block that espnx stores.
#pragma once

#include <cstddef>
#include <cstdint>

namespace espnx {

// The CRC32C of `size` bytes at `data` (any alignment), continuing from `crc`, the CRC32C of what
// came before (0 at the start): crc32c(crc32c(0, a), b) == crc32c(0, a + b). Thread-safe, allocates
// nothing. `data` may be null where `size` is 0.
uint32_t crc32c(uint32_t crc, const void* data, size_t size);

}  // namespace espnx
