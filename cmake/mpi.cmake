# DCOLL_WITH_MPI, and what the plugin compiles and links with: MPI_C_INCLUDE_DIRS, MPI_C_LIBRARIES, DCOLL_MPI_RPATHS.
# The mpirun beside that mpicc is DCOLL_MPIRUN; where it is at run time, mpirun.txt tells Python, beside the plugin.
# CMake's FindMPI knows how to ask each wrapper (Open MPI's -showme, MPICH's and Intel's -show); which wrapper is asked is
# decided here (CMake alone) or by cmake/mpi_discovery.py (setup.py and Makefile).
set(DCOLL_WITH_MPI OFF)
set(DCOLL_MPI_RPATHS "")
set(DCOLL_MPI_SUMMARY "off")

set(mpicc "${DCOLL_MPICC}")
if(mpicc STREQUAL "")
  find_program(DCOLL_MPICC_ON_PATH mpicc)
  if(DCOLL_MPICC_ON_PATH)
    set(mpicc "${DCOLL_MPICC_ON_PATH}")
  else()
    set(mpicc "OFF")
    set(DCOLL_MPI_SUMMARY "off: no mpicc on PATH")
  endif()
endif()

set(mpirun_file "${DCOLL_OUTPUT_DIR}/mpirun.txt")
file(REMOVE "${mpirun_file}")
if(NOT mpicc STREQUAL "OFF")
  if(mpicc MATCHES "[ \t]")  # FindMPI splits -I/a b/include
    message(FATAL_ERROR "The path of ${mpicc} contains a space, with which CMake cannot read mpicc's options. Move what "
                        "contains it to a path without spaces (the source, if its .venv does), set MPICC to another "
                        "mpicc, or build without MPI: DCOLL_MPI=0 (make, pip), -DDCOLL_MPICC=OFF (CMake)")
  endif()
  # FindMPI remembers what it found: forget it when another wrapper is asked for.
  if(NOT "${DCOLL_MPICC_ASKED}" STREQUAL "${mpicc}")
    get_directory_property(cached CACHE_VARIABLES)
    list(FILTER cached INCLUDE REGEX "^(MPI(EXEC)?_|DCOLL_MPIRUN$)")
    foreach(variable IN LISTS cached)
      unset(${variable} CACHE)
    endforeach()
    set(DCOLL_MPICC_ASKED "${mpicc}" CACHE INTERNAL "the wrapper that MPI_C_* belong to")
  endif()
  set(MPI_C_COMPILER "${mpicc}" CACHE FILEPATH "" FORCE)
  set(MPI_CXX_SKIP_MPICXX ON)
  find_package(MPI COMPONENTS C)
  if(NOT MPI_C_FOUND)
    message(FATAL_ERROR "${mpicc} is there, but its MPI cannot be used (see above). Set MPICC to a working wrapper, or "
                        "build without MPI: DCOLL_MPI=0 (pip), -DDCOLL_MPICC=OFF (CMake)")
  endif()
  set(DCOLL_WITH_MPI ON)
  set(DCOLL_MPI_SUMMARY "${mpicc}")

  get_filename_component(folder "${MPI_C_COMPILER}" DIRECTORY)
  find_program(DCOLL_MPIRUN NAMES mpirun mpiexec HINTS "${folder}" NO_DEFAULT_PATH)
  if(DCOLL_MPIRUN)
    get_filename_component(name "${DCOLL_MPIRUN}" NAME)
    if(NOT DCOLL_MPI_BIN STREQUAL "AUTO")
      set(folder "${DCOLL_MPI_BIN}")
    endif()
    file(WRITE "${mpirun_file}" "${folder}/${name}\n")
  endif()

  if(DCOLL_MPI_RPATH STREQUAL "AUTO")
    foreach(library IN LISTS MPI_C_LIBRARIES)
      if(IS_ABSOLUTE "${library}")
        get_filename_component(folder "${library}" DIRECTORY)
        list(APPEND DCOLL_MPI_RPATHS "${folder}")
      endif()
    endforeach()
    list(REMOVE_DUPLICATES DCOLL_MPI_RPATHS)
  else()
    set(DCOLL_MPI_RPATHS "${DCOLL_MPI_RPATH}")
  endif()
endif()
