#!/usr/bin/env bash
# All that needs a GPU: tests, benchmarks and the sanitizer, into one JSON. Nothing is downloaded.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

ALL_STAGES=(build tests upload decode memory memcheck racecheck)

usage() {
    cat <<'END'
usage: bench/gpu.sh [--quick] [--only STAGE,...] [--python PYTHON] [OUT.json]

Builds in place, runs `pytest -m gpu`, bench/gpu_upload.py, bench/gpu_decode.py and
bench/gpu_memory.py, then compute-sanitizer's memcheck and racecheck over a short selection of the
tests. Writes one JSON, by default bench/results/gpu-MACHINE-DATE.json, and logs beside it in
build/gpu. A stage that fails or takes too long does not stop those after it.

  --quick           in less than 8 minutes: fewer runs, fewer layers, less to copy
  --only STAGE,...  of: build tests upload decode memory memcheck racecheck
  --python PYTHON   by default python3

Needs a GPU, CUDA's driver, and of Python: Cython, setuptools, NumPy, CuPy, ml_dtypes, psutil,
rich, pytest; torch, transformers and hypothesis for the tests that use them.

exit code: 0 all is well, 1 a stage failed or a bound does not hold, 2 nothing could be run
END
}

quick=0
only=""
python=python3
out=""
while (($#)); do
    case "$1" in
        -h | --help) usage; exit 0 ;;
        --quick) quick=1 ;;
        --only | --python)
            if (($# < 2)); then
                echo "gpu.sh: $1 needs a value" >&2
                exit 2
            fi
            if [[ $1 == --only ]]; then only=$2; else python=$2; fi
            shift
            ;;
        -*) echo "gpu.sh: unknown option $1; see --help" >&2; exit 2 ;;
        *)
            if [[ -n $out ]]; then
                echo "gpu.sh: more than one output: $out and $1" >&2
                exit 2
            fi
            out=$1
            ;;
    esac
    shift
done
stages=("${ALL_STAGES[@]}")
if [[ -n $only ]]; then
    IFS=, read -r -a stages <<<"$only"
    for stage in "${stages[@]}"; do
        if [[ " ${ALL_STAGES[*]} " != *" $stage "* ]]; then
            echo "gpu.sh: unknown stage $stage; there are: ${ALL_STAGES[*]}" >&2
            exit 2
        fi
    done
fi

has() { "$python" -c "import sys, importlib.util as u; sys.exit(u.find_spec('$1') is None)"; }

missing=()
for package in Cython setuptools numpy cupy ml_dtypes psutil rich pytest; do
    has "$package" || missing+=("$package")
done
if ((${#missing[@]})); then
    echo "gpu.sh: $python lacks: ${missing[*]}" >&2
    exit 2
fi
if ! gpu=$("$python" -c "
import cupy
properties = cupy.cuda.runtime.getDeviceProperties(0)
print(properties['name'].decode())"); then
    echo "gpu.sh: CuPy finds no GPU; nvidia-smi must list one" >&2
    exit 2
fi

versions=$("$python" -c "
import importlib.metadata as m, platform, cupy
def version(name):
    try:
        return m.version(name)
    except m.PackageNotFoundError:
        return 'none'
runtime = cupy.cuda.runtime
print(platform.python_version(), runtime.runtimeGetVersion(), runtime.driverGetVersion(),
      cupy.__version__, *map(version, ('numpy', 'torch', 'transformers')))")
read -r python_version cuda_runtime cuda_driver cupy_version numpy_version torch_version \
    transformers_version <<<"$versions"
driver=$(nvidia-smi --id=0 --query-gpu=driver_version --format=csv,noheader 2>/dev/null) ||
    driver=unknown
commit=$(git rev-parse HEAD 2>/dev/null) || commit=unknown
if [[ $commit != unknown && -n $(git status --porcelain --untracked-files=no) ]]; then
    commit+=" with changes"
fi
cpu=$(sed -n '/^model name/{s/^[^:]*: //p;q}' /proc/cpuinfo)
memory_kib=$(sed -n 's/MemTotal: *\([0-9]*\).*/\1/p' /proc/meminfo)
started=$(date -u +%Y-%m-%dT%H:%M:%SZ)
facts=(
    "gpu=$gpu" "driver=${driver:-unknown}" "cuda_runtime=$cuda_runtime" "cuda_driver=$cuda_driver"
    "cpu=${cpu:-unknown}, $(nproc) cores" "host_memory_kib=$memory_kib"
    "kernel=$(uname -r)" "python=$python_version" "cupy=$cupy_version" "numpy=$numpy_version"
    "torch=$torch_version" "transformers=$transformers_version" "commit=$commit" "date=$started"
    "quick=$quick"
)
printf '%s\n' "${facts[@]}"
if [[ -z $out ]]; then
    name=$(tr '[:upper:] ' '[:lower:]-' <<<"$gpu" | tr -cd '[:alnum:]-')
    suffix=""
    if ((quick)); then suffix=-quick; fi
    out=bench/results/gpu-$name-${started%%T*}$suffix.json
fi

work=build/gpu
mkdir -p "$work"
export PYTHONPATH=$PWD
export PYTHONDONTWRITEBYTECODE=1

wanted() { [[ " ${stages[*]} " == *" $1 "* ]]; }

leave_out() {
    rm -f "$work/$1".{status,json,xml}
    echo "$2" | tee "$work/$1.log"
}

# run NAME SECONDS COMMAND...
run() {
    local name=$1 limit=$2 code=0 start end
    shift 2
    rm -f "$work/$name".{status,json,xml}
    echo "== $name: $*"
    start=$(date +%s.%N)
    timeout --kill-after=20 "$limit" "$@" >"$work/$name.log" 2>&1 || code=$?
    end=$(date +%s.%N)
    tail -n 40 "$work/$name.log"
    echo "$code $(awk -v a="$start" -v b="$end" 'BEGIN { print b - a }') $limit" \
        >"$work/$name.status"
}

# The project's own settings want plug-ins of pytest that may not be here, and warnings of
# libraries that they do not know are errors there.
cat >"$work/pytest.ini" <<END
[pytest]
addopts = --import-mode=importlib -ra -q -p no:cacheprovider
markers = gpu: needs a GPU that CuPy can use
END
pytest=("$python" -m pytest -c "$work/pytest.ini" --rootdir "$PWD" -m gpu)

test_files=()
left_out=()
while IFS= read -r file; do
    lacks=""
    for package in hypothesis torch transformers safetensors; do
        if grep -qE "^(import|from) $package" "$file" && ! has "$package"; then
            lacks+=" $package"
        fi
    done
    if [[ -n $lacks ]]; then
        left_out+=("$file (no$lacks)")
    else
        test_files+=("$file")
    fi
done < <(grep -lwE 'gpu' tests/test_*.py)
for file in ${left_out[@]+"${left_out[@]}"}; do
    echo "left out: $file"
done
facts+=("tests_left_out=${left_out[*]-}")

declare -A limit options
if ((quick)); then
    limits=(150 90 70 90 30 25 20)
    options[upload]="--runs 5 --bytes 256MiB --copy-bytes 512MiB --look-ups 2000"
    options[decode]="--runs 5 --tokens 8 --layers 8 --copy-bytes 512MiB"
    options[memory]="--evictions 20000 --rounds 10"
    checked="weights_may_have or row_nan"
else
    limits=(900 1200 1200 2400 1200 1800 1800)
    checked="what_the_host_does or few_tokens or row_nan"
fi
for i in "${!ALL_STAGES[@]}"; do
    limit[${ALL_STAGES[i]}]=${limits[i]}
done

if wanted build; then
    run build "${limit[build]}" "$python" setup.py -q build_ext --inplace -j "$(nproc)"
fi
if wanted tests; then
    run tests "${limit[tests]}" "${pytest[@]}" --junitxml="$work/tests.xml" "${test_files[@]}"
fi
for name in upload decode memory; do
    if wanted "$name"; then
        read -r -a chosen <<<"${options[$name]-}"
        run "$name" "${limit[$name]}" "$python" -m "bench.gpu_$name" \
            --json "$work/$name.json" ${chosen[@]+"${chosen[@]}"}
    fi
done
sanitizer=$(command -v compute-sanitizer || true)
if [[ -z $sanitizer && -x /usr/local/cuda/bin/compute-sanitizer ]]; then
    sanitizer=/usr/local/cuda/bin/compute-sanitizer
fi
for tool in memcheck racecheck; do
    wanted "$tool" || continue
    if [[ -z $sanitizer ]]; then
        leave_out "$tool" "compute-sanitizer was not found"
    else
        run "$tool" "${limit[$tool]}" "$sanitizer" --tool "$tool" --error-exitcode 9 \
            "${pytest[@]}" --junitxml="$work/$tool.xml" -k "$checked" tests/test_cuda_experts.py
    fi
done

report=("$python" bench/gpu_report.py --work "$work" --out "$out")
for stage in "${stages[@]}"; do report+=(--stage "$stage"); done
for fact in "${facts[@]}"; do report+=(--fact "$fact"); done
"${report[@]}"
