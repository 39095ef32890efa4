#include "cpu_level.hpp"

#include <atomic>

namespace espnx {
namespace {

CpuLevel detect() {
#if defined(__x86_64__)
  // GCC's checks include the operating system's (XGETBV): a kernel that does not save the wide registers
  // reads as "no".
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl");
  if (avx512) return CpuLevel::kAvx512;
  if (avx2) return CpuLevel::kAvx2;
#endif
  return CpuLevel::kPortable;
}

constexpr int kBest = -1;
std::atomic<int> forced_level{kBest};

}  // namespace

CpuLevel best_cpu_level() {
  static const CpuLevel best = detect();
  return best;
}

CpuLevel cpu_level() {
  const int forced = forced_level.load(std::memory_order_relaxed);
  return forced == kBest ? best_cpu_level() : static_cast<CpuLevel>(forced);
}

bool set_cpu_level(int level) {
  if (level > static_cast<int>(best_cpu_level())) return false;
  forced_level.store(level < 0 ? kBest : level, std::memory_order_relaxed);
  return true;
}

}  // namespace espnx
