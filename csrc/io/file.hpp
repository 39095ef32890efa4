// An open file: its path is resolved once, at open, and what was resolved stays readable.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

namespace espnx::io {

// GDS and most NVMe drives move 4 KiB blocks whatever O_DIRECT would allow, so nothing smaller is
// ever asked of the device.
inline constexpr int64_t kBlockBytes = 4096;

enum class Direct : uint8_t {
  yes,
  no,
  automatic
};  // O_DIRECT: required, refused, where the file system takes it
enum class Mode : uint8_t {
  read,
  create,
  update
};  // create truncates; update needs an existing file

struct File {
  File(std::string path, int fd) : path(std::move(path)), fd(fd) {}
  ~File();
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  // The size from fstat, now; throws FailureError.
  int64_t refresh_size();

  std::string path;
  int fd;
  bool direct = false;
  bool writable = false;
  int64_t alignment_bytes = 1;  // of offset, size and memory; 1 where reads are buffered
  std::atomic<int64_t> size_bytes{0};
};

// Throws FailureError: unavailable where `direct` is required and the file system refuses it.
std::shared_ptr<File> open_file(const std::string& path, Mode mode, Direct direct);

// The same file (or a new, empty one) as anonymous memory. Used by the `memory` engine.
std::shared_ptr<File> open_memory_file(const std::string& path, Mode mode);

// Reserves [0, size_bytes) so that later writes cannot run out of space. False where the file
// system cannot reserve (it is extended sparsely then). Throws FailureError: disk_full with bytes
// needed and free; the file is as it was then.
bool allocate_file(File& file, int64_t size_bytes);
void truncate_file(File& file, int64_t size_bytes);
void sync_file(File& file);
void sync_directory(const std::string& path);
int64_t free_bytes(const std::string& path);

}  // namespace espnx::io
