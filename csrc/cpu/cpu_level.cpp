#include "cpu_level.hpp"

#include <atomic>

#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace espnx {
namespace {

// Linux gives a process the 8 KiB of tile registers (and the larger signal frames) only when it
// asks.
bool may_use_tiles() {
#if defined(__x86_64__) && defined(__linux__)
  constexpr long kRequestPermission = 0x1023,
                 kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

CpuLevel detect() {
#if defined(__x86_64__)
  // GCC's checks include the operating system's (XGETBV): a kernel that does not save the wide
  // registers reads as "no".
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
  const bool vnni = avx512 && __builtin_cpu_supports("avx512vnni");
  const bool amx = vnni && __builtin_cpu_supports("amx-tile") &&
                   __builtin_cpu_supports("amx-int8") && __builtin_cpu_supports("amx-bf16");
  if (amx && may_use_tiles()) return CpuLevel::kAmx;
  if (vnni) return CpuLevel::kVnni;
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
