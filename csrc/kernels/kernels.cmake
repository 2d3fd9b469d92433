# Sources of csrc/kernels, relative to the repository root, and the flags that some of them need. include()d by the top
# CMakeLists.txt, which gives DCOLL_KERNEL_SOURCES to the core and, when it builds with CUDA, DCOLL_CUDA_SOURCES too
# (and then CMAKE_CUDA_RUNTIME_LIBRARY=Static and -std=c++20).
set(DCOLL_KERNEL_SOURCES
    csrc/kernels/adaptive_sum.cc
    csrc/kernels/cast_cpu.cc
    csrc/kernels/codec_cpu.cc
    csrc/kernels/copy_cpu.cc
    csrc/kernels/dispatch.cc
    csrc/kernels/isa_generic.cc
    csrc/kernels/low_rank_cpu.cc
    csrc/kernels/pack_cpu.cc
    csrc/kernels/reduce_cpu.cc
    csrc/kernels/scale.cc
    csrc/kernels/topk_cpu.cc
    csrc/kernels/topk_owners.cc)
set(DCOLL_CUDA_SOURCES
    csrc/kernels/cast_cuda.cu
    csrc/kernels/codec_cuda.cu
    csrc/kernels/cuda_status.cu
    csrc/kernels/pack_cuda.cu
    csrc/kernels/reduce_cuda.cu
    csrc/kernels/topk_cuda.cu
    csrc/kernels/topk_sum_cuda.cu)
set_source_files_properties(${DCOLL_CUDA_SOURCES} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)  # names of their own

# -ffp-contract=off: no fused multiply-add, so that every instruction set gives the same bits.
# -fno-unswitch-loops: the loops test "is it scaled?" once per step, which costs nothing; a second copy of each would.
# Under sanitizers -O1: instrumenting the unrolled loops at -O3 takes minutes for each file.
set(_dcoll_simd_flags -O3 -ffp-contract=off)
if(DCOLL_SANITIZE)
  set(_dcoll_simd_flags -O1 -ffp-contract=off)
endif()
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  list(APPEND _dcoll_simd_flags -fno-unswitch-loops)
endif()
set_source_files_properties(csrc/kernels/isa_generic.cc csrc/kernels/low_rank_cpu.cc PROPERTIES COMPILE_OPTIONS "${_dcoll_simd_flags}")
# UBSan sees the loops in isa_generic.cc. The others are the same loops, for which it would take two minutes more.
if(DCOLL_SANITIZE MATCHES "undefined")
  list(APPEND _dcoll_simd_flags -fno-sanitize=undefined)
endif()
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
  list(APPEND DCOLL_KERNEL_SOURCES csrc/kernels/isa_avx2.cc csrc/kernels/isa_avx512.cc
       csrc/kernels/isa_avx512vnni.cc)
  set_source_files_properties(csrc/kernels/isa_avx2.cc PROPERTIES COMPILE_OPTIONS "${_dcoll_simd_flags};-mavx2;-mf16c")
  set(_dcoll_avx512_flags ${_dcoll_simd_flags} -mavx512f -mavx512bw -mavx512vl -mavx512dq -mf16c)
  set_source_files_properties(csrc/kernels/isa_avx512.cc PROPERTIES COMPILE_OPTIONS "${_dcoll_avx512_flags}")
  set_source_files_properties(
    csrc/kernels/isa_avx512vnni.cc PROPERTIES COMPILE_OPTIONS "${_dcoll_avx512_flags};-mavx512vnni")
  unset(_dcoll_avx512_flags)
endif()
unset(_dcoll_simd_flags)
