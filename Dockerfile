# AdaAttn with torch's CPU build.
#
#   docker build -t adaattn .
#   docker run --rm adaattn eval                     # stock against adaattn on the packaged models, offline
#   docker run --rm -v "$PWD:/data" adaattn explain /data/MODEL
#   docker compose up notebook                       # the notebooks; the log has their address with its token

FROM python:3.12-slim AS build
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY . .
# hadolint ignore=DL3013
RUN pip install --no-cache-dir "setuptools>=77" wheel \
    && pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /wheels .

FROM python:3.12-slim AS run
# hadolint ignore=DL3013
RUN pip install --no-cache-dir "torch>=2.6" --index-url https://download.pytorch.org/whl/cpu
COPY --from=build /wheels /wheels
# hadolint ignore=DL3013
RUN pip install --no-cache-dir "$(echo /wheels/*.whl)[eval,gguf,plot]" && rm -r /wheels \
    && useradd --create-home --uid 1000 user \
    && install -d -o user /home/user/.cache/huggingface
USER 1000
WORKDIR /home/user
ENTRYPOINT ["adaattn"]
CMD ["--help"]

FROM run AS notebook
USER 0
# hadolint ignore=DL3013
RUN pip install --no-cache-dir jupyterlab
USER 1000
COPY --chown=user notebooks notebooks
EXPOSE 8888
ENTRYPOINT ["jupyter", "lab", "--ip=0.0.0.0", "--no-browser", "--notebook-dir=notebooks"]
CMD []
