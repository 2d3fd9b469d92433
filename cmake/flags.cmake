# Compiler flags for every C++ file. No -march: the kernels choose their instruction set at run time.
add_compile_options("$<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra>")
if(DCOLL_WERROR)
  add_compile_options("$<$<COMPILE_LANGUAGE:CXX>:-Werror>")
endif()
if(CMAKE_UNITY_BUILD AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  add_compile_options(-Wno-subobject-linkage)  # a file that others include is a header to it, with a namespace of its own
endif()
string(REGEX REPLACE "-O[0-9s]" "-O3" CMAKE_CXX_FLAGS_RELEASE "${CMAKE_CXX_FLAGS_RELEASE}")

if(DCOLL_SANITIZE)
  if(NOT DCOLL_SANITIZE MATCHES "^(address|undefined|thread|address,undefined)$")
    message(FATAL_ERROR "DCOLL_SANITIZE=${DCOLL_SANITIZE} is not one of address, undefined, address,undefined, thread")
  endif()
  # -O1 keeps the reports readable and halves the build time; the release build is tested without sanitizers.
  string(REGEX REPLACE "-O[0-9s]" "-O1" CMAKE_CXX_FLAGS_RELEASE "${CMAKE_CXX_FLAGS_RELEASE}")
  add_compile_options("$<$<COMPILE_LANGUAGE:CXX>:-fsanitize=${DCOLL_SANITIZE};-fno-sanitize-recover=all>")
  add_compile_options("$<$<COMPILE_LANGUAGE:CXX>:-fno-omit-frame-pointer;-g1>")
  # ASan's checks as calls: the kernels' loops compile in a third to two thirds of the time, and run twice as long.
  if(DCOLL_SANITIZE MATCHES "address" AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    add_compile_options("$<$<COMPILE_LANGUAGE:CXX>:SHELL:--param asan-instrumentation-with-call-threshold=0>")
  endif()
  add_link_options(-fsanitize=${DCOLL_SANITIZE})
else()
  # Hardening; a collective of 4 B takes 1 ns longer. The sanitizers find more, and do not go with fortified functions.
  add_compile_options("$<$<COMPILE_LANGUAGE:CXX>:-fstack-protector-strong;-U_FORTIFY_SOURCE;-D_FORTIFY_SOURCE=2>")
  add_link_options(LINKER:-z,relro,-z,now)
  # A Call is some 250 bytes, zeroed for every collective: gcc's `rep stos` for that takes 12 ns of a call of 4 B.
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
    set(_dcoll_strategy "vector_loop:512:noalign,libcall:-1:noalign")
    add_compile_options("$<$<COMPILE_LANGUAGE:CXX>:-mmemset-strategy=${_dcoll_strategy}>")
  endif()
  # Nobody replaces a function of a library of ours by one of his own: they call each other directly.
  add_compile_options("$<$<COMPILE_LANGUAGE:CXX>:-fno-semantic-interposition>")
  # Where the compiler links libstdc++ statically (-static-libstdc++, toolchains beside the system's), that copy must be
  # all of a piece: its functions would call each other, but look up locales in the copy that Python has loaded.
  add_link_options(LINKER:-Bsymbolic-functions LINKER:--exclude-libs,ALL)
endif()
