#include "file.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <vector>

#include "failure.hpp"

namespace espnx::io {
namespace {

[[noreturn]] void fail(Kind kind, int error, const char* what, const std::string& path) {
  Failure failure;
  failure.kind = kind;
  failure.error = error;
  failure.what = what;
  failure.path = path;
  if (error == ENOSPC || error == EDQUOT) {
    failure.kind = Kind::disk_full;
    failure.free_bytes = free_bytes(path);
  }
  throw FailureError(failure);
}

[[noreturn]] void fail_to_reserve(const File& file, int error, int64_t size_bytes) {
  Failure failure;
  failure.kind = error == ENOSPC || error == EDQUOT ? Kind::disk_full : Kind::write;
  failure.error = error;
  failure.what = "cannot reserve space";
  failure.path = file.path;
  failure.needed_bytes = size_bytes;
  failure.free_bytes = free_bytes(file.path);
  throw FailureError(failure);
}

// Whether a file may have so many bytes. Asked before they are reserved, for a file system may give
// all that it has before it finds that this is not enough, and everybody else is out of space
// meanwhile.
bool may_fit(int fd, int64_t size_bytes) {
  struct stat status = {};
  struct statvfs system = {};
  if (fstat(fd, &status) != 0 || !S_ISREG(status.st_mode) || fstatvfs(fd, &system) != 0 ||
      system.f_blocks == 0) {
    return true;
  }
  const int64_t there = std::max<int64_t>(status.st_size, status.st_blocks * 512);
  return (size_bytes - there) / static_cast<int64_t>(system.f_frsize) <=
         static_cast<int64_t>(system.f_bfree);
}

// Opening a FIFO waits for its other end, and a name with a zero byte is another file's.
void check_name(const std::string& path, Kind kind) {
  if (path.find('\0') != std::string::npos)
    fail(Kind::invalid, EINVAL, "a path with a zero byte", "");
  struct stat status = {};
  if (stat(path.c_str(), &status) != 0 || S_ISREG(status.st_mode) || S_ISBLK(status.st_mode))
    return;
  fail(kind, S_ISDIR(status.st_mode) ? EISDIR : EINVAL, "cannot open what is no file", path);
}

int64_t size_of(int fd, const struct stat& status) {
  return S_ISBLK(status.st_mode) ? std::max<int64_t>(lseek(fd, 0, SEEK_END), 0) : status.st_size;
}

// statx(STATX_DIOALIGN) read from the kernel's own layout: C libraries older than the field do not
// declare it.
struct DioAlign {
  bool known = false;
  uint32_t memory_bytes = 0;
  uint32_t offset_bytes = 0;
};

DioAlign query_dio_align(int fd) {
  constexpr unsigned kStatxDioAlign = 0x2000;
  constexpr size_t kMaskAt = 0, kMemoryAlignAt = 0x98, kOffsetAlignAt = 0x9C;
  alignas(8) char raw[256] = {};
  DioAlign result;
  if (syscall(SYS_statx, fd, "", AT_EMPTY_PATH, kStatxDioAlign, raw) != 0) return result;
  uint32_t mask = 0;
  std::memcpy(&mask, raw + kMaskAt, sizeof mask);
  if (!(mask & kStatxDioAlign)) return result;
  result.known = true;
  std::memcpy(&result.memory_bytes, raw + kMemoryAlignAt, sizeof result.memory_bytes);
  std::memcpy(&result.offset_bytes, raw + kOffsetAlignAt, sizeof result.offset_bytes);
  return result;
}

int open_retrying(const std::string& path, int flags) {
  int fd;
  do {
    fd = open(path.c_str(), flags | O_CLOEXEC, 0644);
  } while (fd < 0 && errno == EINTR);
  return fd;
}

int flags_of(Mode mode) {
  if (mode == Mode::read) return O_RDONLY;
  return mode == Mode::create ? O_RDWR | O_CREAT | O_TRUNC : O_RDWR;
}

void copy_into(int target, int source, const std::string& path) {
  std::vector<char> block(1 << 20);
  int64_t at = 0;
  for (;;) {
    ssize_t got = pread(source, block.data(), block.size(), at);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) fail(Kind::read, errno, "cannot load file into memory", path);
    if (got == 0) return;
    for (ssize_t done = 0; done < got;) {
      ssize_t put = pwrite(target, block.data() + done, got - done, at + done);
      if (put < 0 && errno == EINTR) continue;
      if (put < 0) fail(Kind::write, errno, "cannot load file into memory", path);
      done += put;
    }
    at += got;
  }
}

}  // namespace

File::~File() {
  if (fd >= 0) close(fd);
}

int64_t File::refresh_size() {
  struct stat status = {};
  if (fstat(fd, &status) != 0) fail(Kind::read, errno, "cannot stat file", path);
  size_bytes = size_of(fd, status);
  return size_bytes;
}

std::shared_ptr<File> open_file(const std::string& path, Mode mode, Direct direct) {
  const Kind kind = mode == Mode::read ? Kind::read : Kind::write;
  check_name(path, kind);
  int fd = -1;
  bool is_direct = false;
  if (direct != Direct::no) {
    fd = open_retrying(path, flags_of(mode) | O_DIRECT);
    is_direct = fd >= 0;
    if (fd < 0 && (errno != EINVAL || direct == Direct::yes)) {
      fail(errno == EINVAL ? Kind::unavailable : kind, errno, "cannot open file with O_DIRECT",
           path);
    }
  }
  if (fd < 0) fd = open_retrying(path, flags_of(mode));
  if (fd < 0) fail(kind, errno, "cannot open file", path);
  auto file = std::make_shared<File>(path, fd);
  struct stat status = {};
  if (fstat(fd, &status) != 0) fail(kind, errno, "cannot stat file", path);
  if (is_direct) {
    const DioAlign align = query_dio_align(fd);
    if (align.known && align.offset_bytes == 0) {  // accepts the flag, then fails every transfer
      if (direct == Direct::yes)
        fail(Kind::unavailable, EINVAL, "file system has no direct I/O", path);
      if (fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) & ~O_DIRECT) != 0)
        fail(kind, errno, "cannot drop O_DIRECT", path);
      is_direct = false;
    }
    if (is_direct) {
      file->alignment_bytes =
          std::max<int64_t>({kBlockBytes, align.offset_bytes, align.memory_bytes});
    }
  }
  file->direct = is_direct;
  file->writable = mode != Mode::read;
  file->size_bytes = size_of(fd, status);
  return file;
}

std::shared_ptr<File> open_memory_file(const std::string& path, Mode mode) {
  const int fd = memfd_create("espnx", MFD_CLOEXEC);
  if (fd < 0) fail(Kind::write, errno, "cannot create memory file", path);
  auto file = std::make_shared<File>(path, fd);
  file->writable = mode != Mode::read;
  if (mode != Mode::create) {
    auto source = open_file(path, Mode::read, Direct::no);
    copy_into(fd, source->fd, path);
    file->refresh_size();
  }
  return file;
}

bool allocate_file(File& file, int64_t size_bytes) {
  if (size_bytes <= 0) return true;
  const int64_t before = file.refresh_size();
  if (!may_fit(file.fd, size_bytes)) fail_to_reserve(file, ENOSPC, size_bytes);
  int result;
  do {
    result = fallocate(file.fd, 0, 0, size_bytes);
  } while (result != 0 && errno == EINTR);
  if (result == 0) {
    file.refresh_size();
    return true;
  }
  if (errno == EOPNOTSUPP || errno == ENOSYS) {
    if (file.refresh_size() < size_bytes) truncate_file(file, size_bytes);
    return false;
  }
  const int error = errno;
  if (file.writable) {  // ext4 keeps what it found before it ran out
    while (ftruncate(file.fd, before) != 0 && errno == EINTR) {
    }
    file.refresh_size();
  }
  fail_to_reserve(file, error, size_bytes);
}

void truncate_file(File& file, int64_t size_bytes) {
  int result;
  do {
    result = ftruncate(file.fd, size_bytes);
  } while (result != 0 && errno == EINTR);
  if (result != 0) fail(Kind::write, errno, "cannot set file size", file.path);
  file.size_bytes = size_bytes;
}

void sync_file(File& file) {
  if (fsync(file.fd) != 0) fail(Kind::write, errno, "cannot flush file to the device", file.path);
}

void sync_directory(const std::string& path) {
  const int fd = open_retrying(path, O_RDONLY | O_DIRECTORY);
  if (fd < 0) fail(Kind::write, errno, "cannot open directory", path);
  const int result = fsync(fd);
  const int error = errno;
  close(fd);
  // Some network and FUSE file systems have nothing to flush for a directory and say EINVAL.
  if (result != 0 && error != EINVAL)
    fail(Kind::write, error, "cannot flush directory to the device", path);
}

int64_t free_bytes(const std::string& path) {
  struct statvfs status = {};
  if (statvfs(path.c_str(), &status) != 0) {  // perhaps not made yet: then its directory
    const size_t slash = path.rfind('/');
    const std::string parent =
        slash == std::string::npos ? "." : path.substr(0, std::max<size_t>(slash, 1));
    if (statvfs(parent.c_str(), &status) != 0) return -1;
  }
  return static_cast<int64_t>(status.f_bavail) * static_cast<int64_t>(status.f_frsize);
}

}  // namespace espnx::io
