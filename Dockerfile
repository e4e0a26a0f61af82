# GreedySnake with torch for a CPU or for CUDA:
#   docker build -t greedysnake .                                          for a CPU
#   docker build -t greedysnake --build-arg TORCH_INDEX=cu130 .            for CUDA 13
#   docker run --gpus all -v /mnt/nvme0/me:/storage greedysnake greedysnake doctor --storage /storage
# Give it an NVMe drive: the container's own file system refuses direct I/O, or is slow.
FROM python:3.12-slim

ARG TORCH_INDEX=cpu
# inductor compiles C++, and Triton needs a C compiler: any version that the base image offers
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
RUN pip install --no-cache-dir torch==2.13.0 --index-url "https://download.pytorch.org/whl/${TORCH_INDEX}"
COPY . /src
RUN pip install --no-cache-dir --constraint /src/constraints.txt '/src[hf]' \
    && rm -rf /src
RUN useradd --create-home --uid 1000 user
USER 1000
WORKDIR /home/user
CMD ["greedysnake", "--help"]
