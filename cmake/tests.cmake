# One executable and one ctest per tests/<layer>/<name>_test.cc, named <layer>_<name>_test. Those named mpi_* run under
# mpirun, with 3 processes and with 1, where an MPI was found. Those of tests/cuda include .cu files, which compile as C++
# with tests/cuda_shim in place of CUDA.
file(GLOB test_sources CONFIGURE_DEPENDS RELATIVE ${CMAKE_SOURCE_DIR} tests/base/*_test.cc tests/plan/*_test.cc
     tests/kernels/*_test.cc tests/cuda/*_test.cc tests/transport/*_test.cc tests/device/*_test.cc
     tests/engine/*_test.cc)

set(launcher "")
set(seconds 120)
# Measured constants of links are not the user's, nor of an earlier build.
set(environment "UBSAN_OPTIONS=print_stacktrace=1" "XDG_CACHE_HOME=${CMAKE_BINARY_DIR}/cache")
if(DCOLL_SANITIZE)
  set(seconds 400)
  list(APPEND environment "DCOLL_TEST_MAX_RANKS=24")  # of the proofs of schedules, which have no memory to get wrong
endif()
if(DCOLL_SANITIZE MATCHES "address")
  list(APPEND environment "LSAN_OPTIONS=suppressions=${CMAKE_SOURCE_DIR}/cmake/lsan.supp:print_suppressions=0")
elseif(DCOLL_SANITIZE STREQUAL "thread")
  list(APPEND environment "TSAN_OPTIONS=halt_on_error=1:second_deadlock_stack=1")
  # Older TSan runtimes do not start where the kernel randomizes addresses widely; setarch -R switches that off, if it may.
  find_program(DCOLL_SETARCH setarch)
  if(DCOLL_SETARCH)
    execute_process(COMMAND ${DCOLL_SETARCH} -R true RESULT_VARIABLE refused OUTPUT_QUIET ERROR_QUIET)
    if(refused EQUAL 0)
      set(launcher ${DCOLL_SETARCH} -R)
    endif()
  endif()
endif()

if(DCOLL_WITH_MPI)
  set(mpirun "${DCOLL_MPIRUN}")
  if(NOT mpirun)  # there is none beside mpicc
    find_program(DCOLL_MPIRUN_ON_PATH NAMES mpirun mpiexec REQUIRED)
    set(mpirun "${DCOLL_MPIRUN_ON_PATH}")
  endif()
  # More processes than cores, in the words of Open MPI 5 and 4; other MPIs allow it anyway.
  set(mpi_environment PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe OMPI_MCA_rmaps_base_oversubscribe=1)
  if(DCOLL_SANITIZE MATCHES "address")  # whole stacks, or the suppressions do not find the library's name in them
    list(APPEND mpi_environment ASAN_OPTIONS=fast_unwind_on_malloc=0)
  endif()
  execute_process(COMMAND id -u OUTPUT_VARIABLE user OUTPUT_STRIP_TRAILING_WHITESPACE)
  if(user STREQUAL "0")  # containers: Open MPI's mpirun refuses root unless told twice
    list(APPEND mpi_environment OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1)
  endif()
endif()

set(precompiled_engine ${CMAKE_SOURCE_DIR}/tests/engine/rank_threads.h ${CMAKE_SOURCE_DIR}/tests/support/check.h)
set(precompiled_plan ${CMAKE_SOURCE_DIR}/csrc/plan/verify.h ${CMAKE_SOURCE_DIR}/tests/support/check.h)
set(precompiled_transport ${CMAKE_SOURCE_DIR}/tests/transport/ranks.h ${CMAKE_SOURCE_DIR}/tests/support/check.h)

foreach(source IN LISTS test_sources)
  get_filename_component(name "${source}" NAME_WE)
  get_filename_component(folder "${source}" DIRECTORY)
  get_filename_component(layer "${folder}" NAME)
  if(DCOLL_TEST_LAYERS AND NOT layer IN_LIST DCOLL_TEST_LAYERS)
    continue()
  endif()
  # TSan knows nothing of the synchronization inside libraries that it did not compile, MPI's or UCX, and reports all.
  if(DCOLL_SANITIZE STREQUAL "thread" AND name MATCHES "^(mpi|ucx)_")
    continue()
  endif()
  set(needs_mpi OFF)
  if(name MATCHES "^mpi_")
    set(needs_mpi ON)
    if(NOT DCOLL_WITH_MPI)
      continue()
    endif()
  endif()

  set(target ${layer}_${name})
  add_executable(${target} ${source})
  set_target_properties(${target} PROPERTIES UNITY_BUILD OFF INSTALL_RPATH "${DCOLL_OUTPUT_DIR}"
                                             RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/tests)
  target_include_directories(${target} PRIVATE tests)
  target_link_libraries(${target} PRIVATE dcoll_core)
  # Tests compile in two thirds of the time so; those of kernels compute a lot, and under TSan all do. Fortified functions
  # need -O1. UBSan looks at the libraries, not at their tests.
  if(NOT layer MATCHES "^(kernels|cuda)$")
    if(DCOLL_SANITIZE MATCHES "undefined")
      target_compile_options(${target} PRIVATE -O0 -fno-sanitize=undefined)
    else()
      target_compile_options(${target} PRIVATE -O1)
    endif()
    # What most tests of a layer include is read once, in half of the compiler's time. Not for ccache, which has read the
    # unchanged ones before, and not where each file is to name what it needs.
    if(CMAKE_UNITY_BUILD AND NOT CMAKE_CXX_COMPILER_LAUNCHER AND DEFINED precompiled_${layer})
      if(DEFINED precompiled_by_${layer})
        target_precompile_headers(${target} REUSE_FROM ${precompiled_by_${layer}})
      else()
        target_precompile_headers(${target} PRIVATE ${precompiled_${layer}})
        set(precompiled_by_${layer} ${target})
      endif()
    endif()
  endif()
  if(layer MATCHES "^(kernels|cuda)$" AND DCOLL_SANITIZE MATCHES "address" AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    target_compile_options(${target} PRIVATE "SHELL:--param asan-instrumentation-with-call-threshold=7000")  # GCC's own
  endif()
  if(layer STREQUAL "cuda")
    target_include_directories(${target} BEFORE PRIVATE tests/cuda_shim)
    # GCC does not see that pack's copies are stored under the condition under which they are loaded.
    target_compile_options(${target} PRIVATE -Wno-unknown-pragmas -ffp-contract=off
                                             $<$<CXX_COMPILER_ID:GNU>:-Wno-maybe-uninitialized>)
  endif()
  if(target STREQUAL "device_cuda_test")
    # They stand for CUDA's runtime and driver: dlopen() gives what is loaded under that name.
    foreach(fake cudart cuda)
      add_library(fake_${fake} SHARED tests/device/fake_${fake}.cc)
      target_include_directories(fake_${fake} PRIVATE tests)
      set_target_properties(fake_${fake} PROPERTIES OUTPUT_NAME ${fake} LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/tests
                                                    INSTALL_RPATH "$ORIGIN")
    endforeach()
    set_target_properties(fake_cudart PROPERTIES SOVERSION 13)
    set_target_properties(fake_cuda PROPERTIES SOVERSION 1)
    target_link_libraries(fake_cuda PRIVATE fake_cudart)
    target_link_options(${target} PRIVATE LINKER:--no-as-needed)
    target_link_libraries(${target} PRIVATE fake_cudart fake_cuda)
    set_property(TARGET ${target} APPEND PROPERTY INSTALL_RPATH "$ORIGIN")
  endif()
  if(needs_mpi)
    add_dependencies(${target} dcoll_mpi)
    target_compile_definitions(${target} PRIVATE DCOLL_TEST_MPI_PLUGIN="$<TARGET_FILE:dcoll_mpi>")
    foreach(processes 3 1)
      add_test(NAME ${target}_n${processes} COMMAND ${mpirun} -n ${processes} $<TARGET_FILE:${target}>)
      # The number is told: another MPI's mpirun would start so many jobs of one rank each, and each would pass.
      set(rank_environment "${environment};${mpi_environment};DCOLL_TEST_RANKS=${processes}")
      set_tests_properties(${target}_n${processes} PROPERTIES TIMEOUT ${seconds} PROCESSORS 2
                                                              ENVIRONMENT "${rank_environment}")
    endforeach()
  else()
    add_test(NAME ${target} COMMAND ${launcher} $<TARGET_FILE:${target}>)
    set(own_environment "${environment}")
    if(DCOLL_SANITIZE MATCHES "address" AND name MATCHES "^ucx_")  # LeakSanitizer crashes beside UCX's memory hooks
      list(APPEND own_environment ASAN_OPTIONS=detect_leaks=0)
    endif()
    set_tests_properties(${target} PROPERTIES TIMEOUT ${seconds} ENVIRONMENT "${own_environment}")
    if(name STREQUAL "injected_test")  # 4,400 short jobs of ranks that wait for each other: 18 s alone, else minutes
      set_tests_properties(${target} PROPERTIES PROCESSORS 2 TIMEOUT 400)
    endif()
  endif()
endforeach()
