# One image for all three services; the command chooses which, `serve` runs all of them in one container.
#
#   docker build --target cpu  -t triptych:cpu .     # no torch: the native plan does without
#   docker build --target cuda -t triptych:cuda .
#   docker run --rm --init -p 127.0.0.1:50051:50051 -v ./.models:/models:ro triptych:cpu \
#     serve --model /models/SmolLM2-135M-Instruct.Q4_1.gguf

# Debian 12 or newer; both stages must be the same.
ARG BASE=debian:bookworm-slim

# ------------------------------------------------------------------------------------------ build
FROM ${BASE} AS build
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends g++ python3-dev python3-venv \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY pyproject.toml constraints.txt ./
COPY deploy/requirements.py deploy/
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python3 -m venv /tools \
 && python3 -m venv --without-pip /opt/triptych \
 && python3 deploy/requirements.py build > /tools/build.txt \
 && { python3 deploy/requirements.py run --without torch \
      && python3 deploy/requirements.py vllm-grpc; } > /tools/run.txt \
 && /tools/bin/pip install -c constraints.txt -r /tools/build.txt cmake ninja \
 && /tools/bin/pip --python /opt/triptych/bin/python install -c constraints.txt -r /tools/run.txt
COPY CMakeLists.txt README.md LICENSE ./
COPY src src
COPY client client
COPY engine_core engine_core
COPY kernels kernels
COPY protos protos
COPY services services
RUN PATH=/tools/bin:$PATH pip wheel --no-build-isolation --no-deps -w /wheels . \
 && /tools/bin/pip --python /opt/triptych/bin/python install --no-deps /wheels/*.whl
COPY --chmod=0755 deploy/probe.py /opt/triptych/bin/triptych-probe

FROM build AS build-cuda
# The package index's own torch is a CUDA build; its wheels bring the libraries.
RUN python3 deploy/requirements.py cuda > /tools/cuda.txt \
 && /tools/bin/pip --python /opt/triptych/bin/python install -c constraints.txt torch -r /tools/cuda.txt

# ---------------------------------------------------------------------------------------- runtime
FROM ${BASE} AS runtime
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends python3 \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --uid 10001 --user-group --no-create-home --home-dir /nonexistent triptych \
 && install -d -o triptych -g triptych -m 0700 /run/triptych /var/cache/triptych
# The root file system may be read-only: the run directory, the cache and /tmp are all that is written.
ENV PATH=/opt/triptych/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    TRIPTYCH_RUN_DIR=/run/triptych/engine \
    TRIPTYCH_WEIGHT_CACHE=/var/cache/triptych \
    TRIPTYCH_HOST=0.0.0.0 \
    TRIPTYCH_HTTP_HOST=0.0.0.0
USER 10001:10001
WORKDIR /
EXPOSE 50051 8000
STOPSIGNAL SIGTERM
ENTRYPOINT ["triptych"]
CMD ["serve", "--model", "/models/model.gguf"]
HEALTHCHECK --interval=10s --timeout=5s --retries=3 --start-period=600s \
  CMD ["triptych-probe", "127.0.0.1:50051", "triptych.v1.InferenceService"]

FROM runtime AS cuda
# Triton links a launcher for each kernel with a C compiler.
USER 0:0
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends gcc libc6-dev python3-dev \
 && rm -rf /var/lib/apt/lists/*
USER 10001:10001
# Kernels are compiled at the first start, for the GPU that is there, and kept beside the weights.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    TRITON_CACHE_DIR=/var/cache/triptych/triton
COPY --from=build-cuda /opt/triptych /opt/triptych

# The last one is what a build without --target makes.
FROM runtime AS cpu
COPY --from=build /opt/triptych /opt/triptych
