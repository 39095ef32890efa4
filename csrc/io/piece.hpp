// What one request moves between memory and a file, over as many completions as the device makes of
// it: the one routine that says what a completion means. Used by whoever has a queue.
#pragma once

#include <cstdint>

#include "failure.hpp"
#include "io/queue/queue.hpp"

namespace espnx::io {

struct Piece {
  Op op = Op::read;
  File* file = nullptr;
  int64_t offset_bytes = 0;
  char* data = nullptr;
  int64_t size_bytes = 0;      // aligned as the file wants it
  int64_t expected_bytes = 0;  // what must come of it: less than size only at the end of the file
  int idle_retries = 0;        // completions in a row that moved nothing

  Request request(uint64_t tag) const { return {op, file, offset_bytes, data, size_bytes, tag}; }
};

enum class Step : uint8_t {
  done,   // all of it has been moved
  again,  // the piece is what is left of it now: submit it
  failed,
};

struct Progress {
  Step step = Step::done;
  int64_t moved_bytes = 0;  // that count: what is moved again will count then
  Failure failure;          // of a step that failed; without words for what was read
};

// A short transfer goes on from its last whole block, because O_DIRECT cannot begin inside one.
// `result`: of the completion. Never throws.
Progress advance(Piece& piece, int64_t result);

}  // namespace espnx::io
