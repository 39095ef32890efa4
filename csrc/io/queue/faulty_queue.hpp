// Faults on demand, per request, in front of any queue: how every failure path of the engine and of
// its users is tested.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <vector>

#include "queue.hpp"

namespace espnx::io {

enum class Fault : uint8_t {
  error,   // fails with errno `value`
  short_,  // moves at most `value` bytes
  flip,    // bit `value` (modulo the length) arrives, or is written, inverted
  stale,   // reports success and moves nothing
  delay,   // completes `value` nanoseconds late
  never,   // is swallowed
};

struct FaultRule {
  std::string operation = "*";  // read, write, open, allocate, truncate, sync, sync_directory,
                                // rename, unlink, ..., or a glob
  std::string path = "*";       // glob
  int64_t begin_bytes = 0;      // the request overlaps [begin, end)
  int64_t end_bytes = INT64_MAX;
  int64_t nth = 1;     // from the n-th match on (from 1)
  int64_t count = -1;  // this many times; negative: forever
  double probability = 1;
  Fault fault = Fault::error;
  int64_t value = 5;  // EIO
};

// The rules and how often each has matched; shared with callers' threads, which open and sync.
class FaultState {
 public:
  FaultState(std::vector<FaultRule> rules, uint64_t seed)
      : rules_(std::move(rules)), matches_(rules_.size()), random_(seed) {}

  // The rule that hits this operation, or null. Counts.
  const FaultRule* hit(const char* operation, const std::string& path, int64_t offset_bytes,
                       int64_t size_bytes);
  int64_t hits();

 private:
  std::mutex mutex_;
  std::vector<FaultRule> rules_;
  std::vector<int64_t> matches_;
  int64_t hits_ = 0;
  std::mt19937_64 random_;
};

std::unique_ptr<Queue> make_faulty_queue(std::unique_ptr<Queue> inner,
                                         std::shared_ptr<FaultState> state);

}  // namespace espnx::io
