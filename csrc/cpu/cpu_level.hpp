// Which instruction set the CPU kernels use: found by cpuid once, and lowerable at run time so that
// tests reach every one of them.
#pragma once

namespace espnx {

enum class CpuLevel : int {
  kPortable = 0,  // plain C++, no instruction beyond the compiler's baseline
  kAvx2 = 1,      // AVX2 + FMA + F16C; for CRC32C the SSE4.2 crc32 instruction
  kAvx512 = 2,    // AVX-512 F/BW/VL
  kVnni = 3,      // and AVX-512 VNNI: products of whole numbers, summed four bytes at a time
  kAmx = 4,  // and AMX (tiles, int8, bf16), where the operating system lets this process use it
};

// The best level this processor and operating system can run.
CpuLevel best_cpu_level();

// The level in force: the best one, unless set_cpu_level lowered it.
CpuLevel cpu_level();

// Puts `level` in force for the whole process; a negative number puts the best level back.
// False, and nothing changes, where this processor cannot run it: a named level never falls back.
bool set_cpu_level(int level);

}  // namespace espnx
