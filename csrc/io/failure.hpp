// What can go wrong with I/O, as data: crosses from the I/O thread to the caller's thread and
// becomes a typed Python exception there.
#pragma once

#include <cstdint>
#include <exception>
#include <string>

namespace espnx::io {

enum class Kind : uint8_t {
  read,         // the device or file system failed a read
  write,        // ... or a write, flush, open for writing, truncate
  short_read,   // retries used up without progress
  truncated,    // the file ends before the bytes asked for
  disk_full,    // ENOSPC, EDQUOT
  deadline,     // did not complete in time
  closed,       // the engine was closed
  cancelled,    // the caller cancelled the transfer
  checksum,     // arrived whole, but not what was written
  invalid,      // the caller's arguments
  unavailable,  // a data path the caller named cannot be had
};

struct Failure {
  Kind kind = Kind::read;
  int error = 0;  // errno, 0 where none applies
  std::string what;
  std::string path;
  int64_t offset_bytes = -1;
  int64_t size_bytes = -1;
  int64_t needed_bytes = -1;  // disk_full: what the transfer still has to write
  int64_t free_bytes = -1;    // disk_full: what the file system has
  std::string got;
  std::string expected;
};

class FailureError : public std::exception {
 public:
  explicit FailureError(Failure failure) : failure(std::move(failure)) {}
  const char* what() const noexcept override { return failure.what.c_str(); }
  Failure failure;
};

}  // namespace espnx::io
