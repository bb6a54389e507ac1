// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Where the compiler is looked for, in which order, and the sentences when there is none.
#include "gpu/jit/compiler.h"
#include "support.h"

namespace fulmen::gpu {
namespace {

namespace fs = std::filesystem;

// A copy of the fake compiler under the name that a package gives it.
std::string place_fake(const std::string& folder) {
  fs::create_directories(folder);
  const std::string file = folder + "/libnvrtc.so.13";
  fs::copy_file(FAKE_NVRTC_FILE, file);
  return file;
}

// A search that finds nothing of the machine's own.
class NvrtcSearchTest : public testing::Test {
 protected:
  NvrtcSearch search(std::vector<std::string> candidates, int driver_version = 0) const {
    return {std::move(candidates), driver_version, folder_.path() + "/no-toolkit"};
  }
  TemporaryFolder folder_;
  ScopedVariable named_{"FULMEN_NVRTC", std::nullopt};
  ScopedVariable home_{"CUDA_HOME", std::nullopt};
  ScopedVariable path_{"CUDA_PATH", std::nullopt};
};

TEST_F(NvrtcSearchTest, TakesACandidateFileOrFolder) {
  const std::string file = place_fake(folder_.path() + "/package");
  EXPECT_EQ(find_nvrtc(search({file})).path(), file);
  EXPECT_EQ(find_nvrtc(search({folder_.path() + "/package"})).path(), file);
  EXPECT_EQ(find_nvrtc(search({"/no/such/file", file})).version(), 13000);
}

TEST_F(NvrtcSearchTest, TheVariableComesFirstAndAlone) {
  const std::string file = place_fake(folder_.path() + "/package");
  const std::string other = place_fake(folder_.path() + "/other");
  {
    const ScopedVariable named("FULMEN_NVRTC", other);
    EXPECT_EQ(find_nvrtc(search({file})).path(), other);
  }
  const ScopedVariable named("FULMEN_NVRTC", "/no/such/libnvrtc.so");
  expect_error(Status::kNotFound, {"FULMEN_NVRTC", "/no/such/libnvrtc.so"},
               [&] { find_nvrtc(search({file})); });
}

TEST_F(NvrtcSearchTest, TakesACopyThatTheProcessHasLoaded) {
  const std::string file = place_fake(folder_.path() + "/package");
  EXPECT_TRUE(holds_in_child([&] {
    if (::dlopen(FAKE_NVRTC_OF_TORCH_FILE, RTLD_NOW) == nullptr) return false;
    return find_nvrtc(search({file})).path() == FAKE_NVRTC_OF_TORCH_FILE;
  }));
  EXPECT_EQ(find_nvrtc(search({file})).path(), file);
}

TEST_F(NvrtcSearchTest, LooksIntoToolkits) {
  const std::string file = place_fake(folder_.path() + "/toolkit/lib64");
  const ScopedVariable home("CUDA_HOME", folder_.path() + "/toolkit");
  EXPECT_EQ(find_nvrtc(search({})).path(), file);
  NvrtcSearch last = search({});
  last.toolkit = folder_.path() + "/toolkit";
  const ScopedVariable none("CUDA_HOME", std::nullopt);
  EXPECT_EQ(find_nvrtc(last).path(), file);
}

TEST_F(NvrtcSearchTest, RefusesOldCompilersAndSuchAsTheDriverCannotFollow) {
  const std::string file = place_fake(folder_.path() + "/package");
  expect_error(Status::kNotFound, {file.c_str(), "CUDA 13.0", "newer than the driver's CUDA 12.8"},
               [&] { find_nvrtc(search({file}, 12080)); });
  EXPECT_EQ(find_nvrtc(search({file}, 13020)).path(), file);
  const ScopedVariable old("FAKE_NVRTC_VERSION", "12030");
  expect_error(Status::kNotFound, {file.c_str(), "CUDA 12.3, older than 12.4"},
               [&] { find_nvrtc(search({file})); });
}

TEST_F(NvrtcSearchTest, SaysWhatToInstallAndWhatWasTried) {
  expect_error(Status::kNotFound,
               {"pip install nvidia-cuda-nvrtc", "FULMEN_NVRTC", "/no/such/file"},
               [&] { find_nvrtc(search({"/no/such/file"}, 99000)); });
}

TEST_F(NvrtcSearchTest, ALibraryThatIsNoCompilerIsNamed) {
  expect_error(Status::kNotFound, {FAKE_DRIVER_FILE, "is no NVRTC"},
               [&] { Nvrtc::load(FAKE_DRIVER_FILE); });
}

}  // namespace
}  // namespace fulmen::gpu
