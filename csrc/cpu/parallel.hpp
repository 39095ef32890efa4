// A loop over [0, n) on a few short-lived threads. Not a pool: a pool's idle workers spin and steal
// the core of an I/O or FAISS thread beside them, and starting a thread (about 20 us) is small
// beside the work that makes a second one worth it.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <thread>
#include <vector>

namespace espnx {

// Calls work(thread, begin, end) for chunks of at most `grain` that cover [0, n) once, from
// `n_threads` threads numbered from 0, the caller's among them. `work` must not throw. Where the
// system refuses a thread, the others do its share.
template <typename Work>
void parallel_for(int64_t n, int64_t grain, int n_threads, const Work& work) {
  if (n_threads <= 1 || n <= grain) {
    if (n > 0) work(0, int64_t{0}, n);
    return;
  }
  std::atomic<int64_t> next{0};
  const auto drain = [&](int thread) {
    for (int64_t begin = next.fetch_add(grain); begin < n; begin = next.fetch_add(grain)) {
      work(thread, begin, std::min(begin + grain, n));
    }
  };
  std::vector<std::thread> helpers;
  helpers.reserve(n_threads - 1);
  try {
    for (int i = 1; i < n_threads; ++i) helpers.emplace_back(drain, i);
  } catch (const std::exception&) {
    // A limit on threads, or no memory for another. Nothing is lost, since chunks are handed out
    // one by one.
  }
  drain(0);
  for (std::thread& helper : helpers) helper.join();
}

}  // namespace espnx
