// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// std::thread has no word for the size of a stack, so it is a POSIX thread.

#include "gpu/jit/large_stack.h"

#include <pthread.h>

namespace fulmen::gpu {
namespace {

void* run(void* work) {
  (*static_cast<const std::function<void()>*>(work))();
  return nullptr;
}

}  // namespace

void on_large_stack(const std::function<void()>& work) {
  pthread_attr_t attributes;
  pthread_t thread;
  bool started = false;
  if (pthread_attr_init(&attributes) == 0) {
    void* const argument = const_cast<std::function<void()>*>(&work);
    started = pthread_attr_setstacksize(&attributes, kLargeStackBytes) == 0 &&
              pthread_create(&thread, &attributes, run, argument) == 0;
    pthread_attr_destroy(&attributes);
  }
  started ? static_cast<void>(pthread_join(thread, nullptr)) : work();
}

}  // namespace fulmen::gpu
