// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The file format of cached kernels, POSIX reads and writes that look at every result and at whom a
// file belongs to, and flock.

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

constexpr std::string_view kMagic = "fulmen kernel 2\n";
constexpr std::size_t kDigestBytes = 32;
constexpr std::size_t kKeyBytes = 64;
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

std::string encode(std::string_view key, const CompiledKernel& kernel) {
  const std::uint64_t lengths[2] = {kernel.log.size(), kernel.cubin.size()};
  std::string payload(key);
  payload.append(reinterpret_cast<const char*>(lengths), sizeof(lengths));
  payload += kernel.log;
  payload += kernel.cubin;
  std::string bytes(kMagic);
  bytes += bytes_of(sha256(payload));
  return bytes + payload;
}

std::optional<CompiledKernel> decode(std::string_view bytes, std::string_view key) {
  constexpr std::size_t kHead = kKeyBytes + kLengthBytes;
  if (bytes.size() < kMagic.size() + kDigestBytes + kHead) return std::nullopt;
  if (bytes.substr(0, kMagic.size()) != kMagic) return std::nullopt;
  const std::string_view digest = bytes.substr(kMagic.size(), kDigestBytes);
  const std::string_view payload = bytes.substr(kMagic.size() + kDigestBytes);
  if (bytes_of(sha256(payload)) != digest) return std::nullopt;
  if (payload.substr(0, kKeyBytes) != key) return std::nullopt;
  std::uint64_t lengths[2];
  std::memcpy(lengths, payload.data() + kKeyBytes, sizeof(lengths));
  const std::string_view content = payload.substr(kHead);
  if (lengths[0] > content.size() || content.size() - lengths[0] != lengths[1]) return std::nullopt;
  return CompiledKernel{.cubin = std::string(content.substr(lengths[0])),
                        .log = std::string(content.substr(0, lengths[0]))};
}

namespace {

bool is_trusted(uid_t owner) { return owner == ::geteuid() || owner == 0; }

// Why a file or folder may be the work of others, one clause; "" when it is its user's own.
std::string foreign_hand(const struct stat& info) {
  constexpr mode_t kOthersWrite = S_IWGRP | S_IWOTH;
  if (!is_trusted(info.st_uid)) {
    return sentence("it belongs to user ", info.st_uid, ", not to user ", ::geteuid(), " or root");
  }
  if ((info.st_mode & kOthersWrite) != 0) {
    return "others may write to it: take that right away (chmod go-w)";
  }
  return "";
}

// 0, or the error. Makes what is missing from the top down.
int make_folders(const std::string& path) {
  for (std::size_t end = path.find('/', 1);; end = path.find('/', end + 1)) {
    const std::string part = path.substr(0, end);
    const int error = ::mkdir(part.c_str(), 0700) == 0 ? 0 : errno;
    struct stat info{};
    const bool is_there = error == 0 || ::stat(part.c_str(), &info) == 0;
    if (!is_there) return error;
    if (end == std::string::npos) return 0;
  }
}

}  // namespace

std::string make_own_folder(const std::string& path) {
  if (const int error = make_folders(path); error != 0) {
    return sentence("cannot be made (", std::strerror(error), ")");
  }
  struct stat link{};
  if (::lstat(path.c_str(), &link) == 0 && S_ISLNK(link.st_mode) && !is_trusted(link.st_uid)) {
    return sentence("is not used: it is a link of user ", link.st_uid);
  }
  const File folder(path, O_RDONLY | O_DIRECTORY);
  struct stat info{};
  if (folder.descriptor() < 0 || ::fstat(folder.descriptor(), &info) != 0) {
    return sentence("cannot be used (", std::strerror(errno), ")");
  }
  const std::string hand = foreign_hand(info);
  return hand.empty() ? "" : "is not used: " + hand;
}

FileContent read_file(const std::string& path, Trust trust, std::uint64_t limit_bytes) {
  const File file(path, O_RDONLY | O_NONBLOCK | (trust == Trust::kOwn ? O_NOFOLLOW : 0));
  struct stat info{};
  if (file.descriptor() < 0 || ::fstat(file.descriptor(), &info) != 0) {
    const bool is_link = errno == ELOOP && trust == Trust::kOwn;
    return {{}, errno == ENOENT ? "" : is_link ? "it is a link" : std::strerror(errno)};
  }
  if (!S_ISREG(info.st_mode)) return {{}, "it is no regular file"};
  if (trust == Trust::kOwn) {
    if (const std::string hand = foreign_hand(info); !hand.empty()) return {{}, hand};
  }
  const auto size = static_cast<std::uint64_t>(info.st_size);
  if (size > limit_bytes) {
    return {{}, sentence("it has ", size, " bytes, at most ", limit_bytes, " are read")};
  }
  std::string bytes(size, '\0');
  std::size_t at = 0;
  while (at < bytes.size()) {
    const ssize_t got = ::read(file.descriptor(), bytes.data() + at, bytes.size() - at);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return {{}, std::strerror(errno)};
    if (got == 0) return {{}, "it was cut short while it was read"};
    at += static_cast<std::size_t>(got);
  }
  // Marked as used now; a read-only folder simply stays as it is.
  if (trust == Trust::kOwn) ::futimens(file.descriptor(), nullptr);
  return {std::move(bytes), ""};
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
    : descriptor_(
          ::open(path.c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0600)) {
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
