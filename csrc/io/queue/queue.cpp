#include "queue.hpp"

#include "io/failure.hpp"

namespace espnx::io {
namespace {

[[noreturn]] void fail(Kind kind, std::string what) {
  Failure failure;
  failure.kind = kind;
  failure.what = std::move(what);
  throw FailureError(failure);
}

}  // namespace

std::unique_ptr<Queue> make_queue(const std::string& path, unsigned depth, unsigned threads,
                                  std::string& effective, std::string& reason) {
  effective = path;
  if (path == "memory") return make_inline_queue();
  if (path == "posix") return make_posix_queue(threads);
  if (path != "uring" && path != "auto") fail(Kind::invalid, "unknown path '" + path + "'");
  auto queue = make_uring_queue(depth, reason);
  if (queue) {
    effective = "uring";
    return queue;
  }
  if (path == "uring") fail(Kind::unavailable, "path 'uring' cannot be had: " + reason);
  effective = "posix";
  return make_posix_queue(threads);
}

}  // namespace espnx::io
