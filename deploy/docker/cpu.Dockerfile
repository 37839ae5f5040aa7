# headway on CPUs, with the tested set of packages:
#   docker build -f deploy/docker/cpu.Dockerfile -t headway:cpu .
FROM python:3.11.14-slim-bookworm

# bubblewrap: the sandbox of code verifiers. wget: KubeRay's health checks. g++, libnuma1, libgomp1: vLLM on CPUs.
RUN apt-get update \
    && apt-get install -y --no-install-recommends bubblewrap g++ libgomp1 libnuma1 procps wget \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/headway
COPY requirements/cpu.txt requirements/cpu.txt
RUN pip install --no-cache-dir --index-url https://download.pytorch.org/whl/cpu torch==2.13.0 \
    && pip install --no-cache-dir --no-deps -r requirements/cpu.txt

COPY pyproject.toml README.md LICENSE ./
COPY core core
COPY verifiers verifiers
COPY learner learner
COPY actors actors
COPY cluster cluster
RUN pip install --no-cache-dir --no-deps --no-build-isolation .

RUN useradd --create-home --uid 1000 headway && mkdir /runs && chown headway /runs
USER headway
WORKDIR /home/headway
ENV PYTHONUNBUFFERED=1
ENTRYPOINT ["headway"]
