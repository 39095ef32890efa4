// See piece.hpp.
#include "piece.hpp"

#include <algorithm>
#include <cerrno>
#include <string>

namespace espnx::io {
namespace {

constexpr int kIdleRetries = 16;  // completions without progress before a piece is given up

Progress failed(const Piece& piece, Kind kind, int error, int64_t moved_bytes = 0) {
  Progress progress;
  progress.step = Step::failed;
  progress.moved_bytes = moved_bytes;
  progress.failure.kind = kind;
  progress.failure.error = error;
  progress.failure.path = piece.file->path;
  progress.failure.offset_bytes = piece.offset_bytes;
  progress.failure.size_bytes = piece.expected_bytes;
  return progress;
}

Kind kind_of(const Piece& piece, int error) {
  if (piece.op == Op::read) return Kind::read;
  return error == ENOSPC || error == EDQUOT ? Kind::disk_full : Kind::write;
}

}  // namespace

Progress advance(Piece& piece, int64_t result) {
  if (result < 0) {
    const auto error = static_cast<int>(-result);
    const bool passes = error == EAGAIN || error == EINTR;
    if (passes && ++piece.idle_retries <= kIdleRetries) return {Step::again, 0, {}};
    return failed(piece, kind_of(piece, error), error);
  }
  const int64_t moved = std::min(result, piece.expected_bytes);
  if (moved == piece.expected_bytes) return {Step::done, moved, {}};
  const int64_t end_bytes = piece.offset_bytes + piece.expected_bytes;
  if (piece.op == Op::read) {
    // A file that is being cut ends inside a block, where O_DIRECT delivers the same few bytes for
    // ever: every short read asks for the size.
    try {
      if (end_bytes > piece.file->refresh_size()) {
        Progress progress = failed(piece, Kind::truncated, 0, moved);
        progress.failure.got = "a file of " + std::to_string(piece.file->size_bytes) + " bytes";
        progress.failure.expected = "at least " + std::to_string(end_bytes);
        return progress;
      }
    } catch (const FailureError& error) {
      return failed(piece, Kind::read, error.failure.error, moved);
    }
  }
  const int64_t whole = piece.file->direct
                            ? moved / piece.file->alignment_bytes * piece.file->alignment_bytes
                            : moved;
  piece.idle_retries = whole > 0 ? 0 : piece.idle_retries + 1;
  if (piece.idle_retries > kIdleRetries) {
    Progress progress =
        failed(piece, piece.op == Op::read ? Kind::short_read : Kind::write, 0, moved);
    progress.failure.got = std::to_string(kIdleRetries) + " completions without progress";
    return progress;
  }
  piece.offset_bytes += whole;
  piece.data += whole;
  piece.size_bytes -= whole;
  piece.expected_bytes -= whole;
  return {Step::again, whole, {}};
}

}  // namespace espnx::io
