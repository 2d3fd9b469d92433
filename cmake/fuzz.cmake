# tests/fuzz/*.cc. With DCOLL_FUZZ (clang): libFuzzer programs fuzz_<name>, which `make fuzz` runs. Otherwise one ctest
# each, which replays tests/fuzz/corpus/<name> and a fixed number of random mutations of it, and prints its seed.
set(fuzzers settings calibration_cache notes handshake meeting)
set(fuzz_mutations_settings 2000)
set(fuzz_mutations_calibration_cache 500)
set(fuzz_mutations_notes 5000)
set(fuzz_mutations_handshake 200)  # a handshake takes some milliseconds
set(fuzz_mutations_meeting 1000)   # and so does a meeting that fails

if(DCOLL_FUZZ)
  if(NOT CMAKE_CXX_COMPILER_ID MATCHES "Clang")
    message(FATAL_ERROR "DCOLL_FUZZ needs clang, whose libFuzzer it uses: -DCMAKE_CXX_COMPILER=clang++")
  endif()
  # What is parsed, without the rest of the core: clang 14 does not compile its coroutines.
  file(GLOB fuzzed CONFIGURE_DEPENDS csrc/base/*.cc)
  foreach(parsed engine/links/calibration_cache engine/watch/failure engine/watch/stall_report transport/bell
                 transport/mapped/region transport/mapped/shm_mesh transport/mapped/shm_socket transport/meeting
                 transport/messages transport/os/lifelines transport/os/processes transport/presence transport/start_up)
    list(APPEND fuzzed csrc/${parsed}.cc)
  endforeach()
  add_library(dcoll_fuzzed STATIC ${fuzzed})
  target_include_directories(dcoll_fuzzed PUBLIC csrc)
  target_compile_definitions(dcoll_fuzzed PUBLIC DCOLL_CUDA=0 DCOLL_VERSION="fuzz")
  target_compile_options(dcoll_fuzzed PUBLIC -fsanitize=fuzzer-no-link,address,undefined -fno-sanitize-recover=all -g1)
  target_link_libraries(dcoll_fuzzed PUBLIC Threads::Threads)
endif()

foreach(name IN LISTS fuzzers)
  add_executable(fuzz_${name} tests/fuzz/${name}.cc)
  set_target_properties(fuzz_${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/tests UNITY_BUILD OFF)
  if(DCOLL_FUZZ)
    target_link_libraries(fuzz_${name} PRIVATE dcoll_fuzzed -fsanitize=fuzzer,address,undefined)
  else()
    target_sources(fuzz_${name} PRIVATE tests/fuzz/replay.cc)
    target_link_libraries(fuzz_${name} PRIVATE dcoll_core)
    set_target_properties(fuzz_${name} PROPERTIES INSTALL_RPATH "${DCOLL_OUTPUT_DIR}")
    add_test(NAME fuzz_${name}
             COMMAND fuzz_${name} ${CMAKE_SOURCE_DIR}/tests/fuzz/corpus/${name} ${fuzz_mutations_${name}})
    set_tests_properties(fuzz_${name} PROPERTIES TIMEOUT 120)
  endif()
endforeach()
