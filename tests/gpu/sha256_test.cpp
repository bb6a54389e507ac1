// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Published digests (FIPS 180-4 examples; NIST CAVP for the empty message).
#include "gpu/jit/sha256.h"

#include <gtest/gtest.h>

namespace fulmen::gpu {
namespace {

TEST(Sha256, PublishedDigests) {
  EXPECT_EQ(hex(sha256("")), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(hex(sha256("abc")), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(hex(sha256("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq")),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  EXPECT_EQ(hex(sha256(std::string(1000000, 'a'))),
            "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST(Sha256, FieldsDoNotRunTogether) {
  Sha256 one;
  one.add_field("ab");
  one.add_field("c");
  Sha256 other;
  other.add_field("a");
  other.add_field("bc");
  EXPECT_NE(one.finish(), other.finish());
}

}  // namespace
}  // namespace fulmen::gpu
