# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
#
# src/cpu/isa: one translation unit per instruction set, the same kernels compiled with flags of their
# own. The rest of the library keeps the baseline of the target and chooses at run time.
set(FULMEN_ISA_SOURCES ${PROJECT_SOURCE_DIR}/src/cpu/isa/kernels_baseline.cpp)

if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64|amd64")
  set(FULMEN_ISA_AVX2 ${PROJECT_SOURCE_DIR}/src/cpu/isa/kernels_avx2.cpp)
  set(FULMEN_ISA_AVX512 ${PROJECT_SOURCE_DIR}/src/cpu/isa/kernels_avx512.cpp)
  set(FULMEN_ISA_AVX512_BF16 ${PROJECT_SOURCE_DIR}/src/cpu/isa/kernels_avx512bf16.cpp)
  set_source_files_properties(${FULMEN_ISA_AVX2} PROPERTIES
    COMPILE_OPTIONS "-mavx2;-mfma;-mf16c")
  set_source_files_properties(${FULMEN_ISA_AVX512} PROPERTIES
    COMPILE_OPTIONS "-mavx512f;-mavx512bw;-mavx512dq;-mavx512vl;-mfma;-mf16c")
  set_source_files_properties(${FULMEN_ISA_AVX512_BF16} PROPERTIES
    COMPILE_OPTIONS
    "-mavx512f;-mavx512bw;-mavx512dq;-mavx512vl;-mavx512bf16;-mfma;-mf16c;-mamx-tile;-mamx-bf16")
  list(APPEND FULMEN_ISA_SOURCES ${FULMEN_ISA_AVX2} ${FULMEN_ISA_AVX512} ${FULMEN_ISA_AVX512_BF16})
elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "aarch64|arm64")
  set(FULMEN_ISA_NEON_BF16 ${PROJECT_SOURCE_DIR}/src/cpu/isa/kernels_neonbf16.cpp)
  set_source_files_properties(${FULMEN_ISA_NEON_BF16} PROPERTIES
    COMPILE_OPTIONS "-march=armv8.2-a+bf16")
  list(APPEND FULMEN_ISA_SOURCES ${FULMEN_ISA_NEON_BF16})
endif()

# Vectors are passed between functions of one unit only, so the psABI notes do not concern us; the
# AVX-512 headers of g++ 12 warn about their own undefined vectors; -O3 even where the rest is built
# for size, since register tiles live on unrolled loops.
if(NOT FULMEN_SANITIZE)  # whose builds are small and quick to make instead
  set(FULMEN_ISA_LEVEL $<$<CONFIG:Release,RelWithDebInfo,MinSizeRel>:-O3>)
endif()
set_property(SOURCE ${FULMEN_ISA_SOURCES} APPEND PROPERTY COMPILE_OPTIONS
  -Wno-psabi $<$<CXX_COMPILER_ID:GNU>:-Wno-maybe-uninitialized>
  ${FULMEN_ISA_LEVEL})
target_sources(fulmen_objects PRIVATE ${FULMEN_ISA_SOURCES})
