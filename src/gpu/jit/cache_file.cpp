// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The file format of cached kernels, POSIX reads and writes that look at every result, and flock.

#include "gpu/jit/cache_file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <thread>
#include <utility>

#include "core/error.h"
#include "gpu/jit/sha256.h"

namespace fulmen::gpu {
namespace {

constexpr std::string_view kMagic = "fulmen kernel 1\n";
constexpr std::size_t kDigestBytes = 32;
constexpr std::size_t kLengthBytes = 16;

// A file descriptor that closes itself.
class File {
 public:
  File(const std::string& path, int flags)
      : descriptor_(::open(path.c_str(), flags | O_CLOEXEC, 0600)) {}
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  ~File() {
    if (descriptor_ >= 0) ::close(descriptor_);
  }
  int descriptor() const { return descriptor_; }
  bool close_now() { return ::close(std::exchange(descriptor_, -1)) == 0; }

 private:
  int descriptor_;
};

bool write_all(int descriptor, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t written = ::write(descriptor, bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return false;
    bytes.remove_prefix(static_cast<std::size_t>(written));
  }
  return true;
}

}  // namespace

std::string encode(const CompiledKernel& kernel) {
  const std::uint64_t lengths[2] = {kernel.log.size(), kernel.cubin.size()};
  std::string payload(reinterpret_cast<const char*>(lengths), sizeof(lengths));
  payload += kernel.log;
  payload += kernel.cubin;
  std::string bytes(kMagic);
  bytes += bytes_of(sha256(payload));
  return bytes + payload;
}

std::optional<CompiledKernel> decode(std::string_view bytes) {
  if (bytes.size() < kMagic.size() + kDigestBytes + kLengthBytes) return std::nullopt;
  if (bytes.substr(0, kMagic.size()) != kMagic) return std::nullopt;
  const std::string_view digest = bytes.substr(kMagic.size(), kDigestBytes);
  const std::string_view payload = bytes.substr(kMagic.size() + kDigestBytes);
  if (bytes_of(sha256(payload)) != digest) return std::nullopt;
  std::uint64_t lengths[2];
  std::memcpy(lengths, payload.data(), sizeof(lengths));
  const std::string_view content = payload.substr(kLengthBytes);
  if (lengths[0] > content.size() || content.size() - lengths[0] != lengths[1]) return std::nullopt;
  return CompiledKernel{.cubin = std::string(content.substr(lengths[0])),
                        .log = std::string(content.substr(0, lengths[0]))};
}

std::optional<std::string> read_file(const std::string& path, bool touch) {
  const File file(path, O_RDONLY);
  struct stat info{};
  if (file.descriptor() < 0 || ::fstat(file.descriptor(), &info) != 0) return std::nullopt;
  std::string bytes(static_cast<std::size_t>(info.st_size), '\0');
  std::size_t at = 0;
  while (at < bytes.size()) {
    const ssize_t got = ::read(file.descriptor(), bytes.data() + at, bytes.size() - at);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return std::nullopt;
    at += static_cast<std::size_t>(got);
  }
  if (touch) ::futimens(file.descriptor(), nullptr);  // a read-only folder simply stays as it is
  return bytes;
}

std::string write_file_atomically(const std::string& path, std::string_view bytes) {
  static std::atomic<unsigned> counter{0};
  const std::string temporary = sentence(path, ".", ::getpid(), ".", counter.fetch_add(1), ".tmp");
  const auto failed = [&](int error) {
    ::unlink(temporary.c_str());
    return std::string(std::strerror(error));
  };
  ::unlink(temporary.c_str());  // left by a dead process that had this number
  File file(temporary, O_WRONLY | O_CREAT | O_EXCL);
  if (file.descriptor() < 0) return failed(errno);
  if (!write_all(file.descriptor(), bytes)) return failed(errno);
  if (!file.close_now()) return failed(errno);
  if (::rename(temporary.c_str(), path.c_str()) != 0) return failed(errno);
  return "";
}

// flock, polled, since it has no waiting with a limit. The lock belongs to the open file and not to
// the process, so it also keeps threads apart.
FileLock::FileLock(const std::string& path, std::chrono::milliseconds patience)
    : descriptor_(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600)) {
  if (descriptor_ < 0) {
    reason_ = std::strerror(errno);
    return;
  }
  constexpr std::chrono::milliseconds kPoll{5};
  const auto deadline = std::chrono::steady_clock::now() + patience;
  while (true) {
    held_ = ::flock(descriptor_, LOCK_EX | LOCK_NB) == 0;
    if (held_) return;
    if (errno != EWOULDBLOCK && errno != EINTR) {
      reason_ = std::strerror(errno);
      return;
    }
    if (std::chrono::steady_clock::now() >= deadline) {
      reason_ = "another process held it for too long";
      return;
    }
    std::this_thread::sleep_for(kPoll);
  }
}

FileLock::~FileLock() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

}  // namespace fulmen::gpu
